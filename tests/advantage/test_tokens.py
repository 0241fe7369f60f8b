"""Advantages per token."""

import numpy as np
import pytest
import torch

from verl_drmas.advantage import broadcast


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.float32, torch.float64, torch.bfloat16])
def test_masked_float32(dtype):
    mask = torch.tensor([[1, 0, 1, 0], [0, 0, 0, 0], [1, 1, 1, 1]]).to(dtype)
    got = broadcast(np.array([0.1, 5.0, -2.0]), mask)
    assert got.dtype == torch.float32
    expected = [[np.float32(0.1), 0, np.float32(0.1), 0], [0, 0, 0, 0], [-2, -2, -2, -2]]
    torch.testing.assert_close(got, torch.tensor(np.array(expected, dtype=np.float32)), rtol=0, atol=0)


def test_shapes_are_checked():
    with pytest.raises(ValueError, match=r"\(3, 4\) for 2 advantages"):
        broadcast(np.zeros(2), torch.ones(3, 4))
    with pytest.raises(ValueError, match="rows, tokens"):
        broadcast(np.zeros(2), torch.ones(2))
