"""Loss balance: equal mass, exactly, in the unit that verl's loss counts in."""

import inspect
import re

import numpy as np
import pytest
import torch
from verl.trainer.ppo.core_algos import agg_loss

from verl_drmas.advantage import balance_weights, loss_unit, row_size

MODES = ["token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-sum-norm", "seq-mean-token-mean"]
KEYS = {"agent": lambda c, i: (c["uid"][i], c["agent_id"][i]), "session": lambda c, i: (c["uid"][i], c["session"][i])}


def batch(rows=200):
    draw = np.random.default_rng(3)
    columns = {
        "uid": draw.choice(["p", "q", "r"], rows),
        "session": draw.integers(0, 4, rows),
        "agent_id": draw.choice(["solver", "verifier"], rows, p=[0.8, 0.2]),
    }
    tokens = draw.integers(0, 30, rows)
    tokens[:5] = 0
    return columns, tokens


def masses(columns, balance, mass):
    by_group = {}
    for row, value in enumerate(mass):
        by_group[KEYS[balance](columns, row)] = by_group.get(KEYS[balance](columns, row), 0.0) + value
    return np.array(list(by_group.values()))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("balance", ["agent", "session"])
def test_every_group_has_the_same_mass_and_the_total_stays(balance, mode):
    columns, tokens = batch()
    size = row_size(tokens, mode)
    weights = balance_weights(**columns, size=size, balance=balance)
    groups = masses(columns, balance, weights * size)
    np.testing.assert_allclose(groups, size.sum() / len(groups), rtol=1e-13)
    assert (weights * size).sum() == pytest.approx(size.sum(), rel=1e-13)
    assert (weights[tokens == 0] == 1.0).all()
    assert np.ptp(masses(columns, balance, size)) > 1


def test_by_hand():
    """The solver's 30 tokens in two rows and the verifier's 10 in one become 20 and 20."""
    columns = {"uid": ["p"] * 3, "session": [0, 1, 0], "agent_id": ["solver", "solver", "verifier"]}
    np.testing.assert_allclose(balance_weights(**columns, size=[10, 20, 10], balance="agent"), [2 / 3, 2 / 3, 2])
    np.testing.assert_allclose(balance_weights(**columns, size=[10, 20, 10], balance="session"), [1, 1, 1])
    np.testing.assert_allclose(balance_weights(**columns, size=[1, 1, 1], balance="session"), [0.75, 1.5, 0.75])
    np.testing.assert_array_equal(balance_weights(**columns, size=[10, 20, 10], balance="none"), [1, 1, 1])


def test_group_without_trained_tokens_gets_no_share():
    columns = {"uid": ["p"] * 3, "session": [0, 0, 1], "agent_id": ["a", "b", "c"]}
    np.testing.assert_array_equal(balance_weights(**columns, size=[6, 0, 2], balance="agent"), [4 / 6, 1, 2])
    np.testing.assert_array_equal(balance_weights(**columns, size=[0, 0, 0], balance="agent"), [1, 1, 1])


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("balance", ["agent", "session"])
def test_weights_in_a_loss_give_each_group_its_share(balance, mode):
    """As rollout_is_weights in verl's own agg_loss, on losses whose mean over a row is 1 in the loss's unit.

    A row's gradient by a common factor is its part of the loss; summed by group, the parts must be equal.
    """
    columns, tokens = batch()
    mask = (torch.arange(32)[None, :] < torch.tensor(tokens)[:, None]).double()
    weights = torch.tensor(balance_weights(**columns, size=row_size(tokens, mode), balance=balance))
    # Under the token-sum row modes one action counts once when its summed loss is 1.
    level = 1 / mask.sum(-1).clamp(min=1) if mode.startswith("seq-mean-token-sum") else torch.ones(len(tokens))
    factor = torch.ones(len(tokens), dtype=torch.float64, requires_grad=True)
    losses = (level * factor)[:, None] * mask
    plain = agg_loss(losses, mask, mode)
    weighted = agg_loss(losses * weights[:, None], mask, mode)
    (parts,) = torch.autograd.grad(weighted, factor)
    shares = masses(columns, balance, parts.numpy())
    np.testing.assert_allclose(shares, shares.mean(), rtol=1e-6)  # verl adds 1e-8 to a row's tokens in one mode
    assert weighted.item() == pytest.approx(plain.item(), rel=1e-6)


def test_every_mode_of_verl_has_a_unit():
    """A mode that verl gains or loses must show here first: they are the string literals of its agg_loss."""
    assert set(re.findall(r'"((?:token|seq)-[a-z-]+)"', inspect.getsource(agg_loss))) == set(MODES)
    for mode in MODES:
        assert loss_unit(mode) == ("token" if mode.startswith("token") else "row")
    with pytest.raises(ValueError, match="loss_agg_mode='token_mean' is unknown: did you mean 'token-mean'"):
        loss_unit("token_mean")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"balance": "agents"}, "did you mean 'agent'"),
        ({"size": [1, -2]}, "size of row 1 is -2"),
        ({"size": [1, np.nan]}, "size of row 1 is nan"),
        ({"session": [0]}, "session has 1 ids for 2 rows"),
    ],
)
def test_wrong_input_is_refused(change, message):
    arguments = {"uid": [0, 0], "session": [0, 1], "agent_id": ["a", "b"], "size": [1, 2], "balance": "agent"}
    with pytest.raises(ValueError, match=message):
        balance_weights(**{**arguments, **change})
