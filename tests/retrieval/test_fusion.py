"""The best of many, and two rankings as one, in an order that is always the same."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from verl_drmas.retrieval.fusion import fuse, ranked


def test_reciprocal_ranks_add_up():
    fused = fuse([[(5, 9.0), (7, 1.0)], [(7, 0.2), (3, 0.1)]], k=10)
    assert fused == [(7, 1 / 62 + 1 / 61), (5, 1 / 61), (3, 1 / 62)]
    assert fuse([[(5, 9.0), (7, 1.0)], [(7, 0.2), (3, 0.1)]], k=1) == fused[:1]


def test_equal_scores_go_by_row():
    assert [row for row, _ in fuse([[(9, 1.0), (2, 0.5)], [(4, 1.0), (1, 0.5)]], k=4)] == [4, 9, 1, 2]
    assert fuse([[], []], k=3) == []


def test_the_constant_says_how_much_the_first_ranks_count():
    first_once, second_twice = [(1, 1.0), (2, 0.5)], [(3, 1.0), (2, 0.5)]
    assert fuse([first_once, second_twice], k=1)[0][0] == 2
    assert fuse([first_once, second_twice], k=1, constant=0.0)[0][0] != 3
    assert fuse([first_once, second_twice], k=3, constant=-0.5)[0][0] == 1


@given(st.lists(st.integers(0, 4), max_size=30), st.integers(1, 40))
def test_ranked_is_a_sort_cut_off(scores, k):
    rows = np.arange(len(scores))[::-1] * 3
    expected = sorted(zip(rows.tolist(), map(float, scores), strict=True), key=lambda pair: (-pair[1], pair[0]))[:k]
    assert ranked(rows, np.asarray(scores, dtype=np.float32), k) == expected
