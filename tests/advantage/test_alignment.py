"""Alignment: D copies a session, drawn from nothing but the seed and the session's id."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from verl_drmas.advantage import ALIGN_MODES, align, seed_of, target_of

COUNTS = st.lists(st.integers(0, 12), min_size=1, max_size=8)
TARGETS = st.integers(1, 9)
SEEDS = st.tuples(st.integers(0, 2**40), st.integers(0, 1000), st.sampled_from(["searcher", "coder"]))


@settings(max_examples=100, deadline=None)
@given(COUNTS, TARGETS, SEEDS)
def test_every_calling_session_counts_d(counts, target, seed):
    """sample: whole copies; d < D keeps every trajectory, d > D keeps D once each; expected: equal shares."""
    drawn = align(counts, target, seed=seed, mode="sample")
    shared = align(counts, target, seed=seed, mode="expected")
    assert len(drawn) == len(shared) == len(counts)
    for count, copies, shares in zip(counts, drawn, shared, strict=True):
        assert copies.shape == shares.shape == (count,)
        assert copies.dtype == shares.dtype == np.float64
        if not count:
            continue
        assert copies.sum() == target
        assert (copies == np.rint(copies)).all()
        assert (copies >= 1).all() if count <= target else (copies <= 1).all()
        assert shares.sum() == pytest.approx(target, rel=1e-12)
        assert (shares == target / count).all()


@settings(max_examples=80, deadline=None)
@given(COUNTS, TARGETS, SEEDS)
def test_mask_keeps_what_sample_keeps_and_makes_nothing_up(counts, target, seed):
    kept = align(counts, target, seed=seed, mode="mask")
    drawn = align(counts, target, seed=seed, mode="sample")
    for count, copies, like in zip(counts, kept, drawn, strict=True):
        assert copies.sum() == min(count, target)
        np.testing.assert_array_equal(copies, np.minimum(like, 1))


@settings(max_examples=80, deadline=None)
@given(COUNTS, TARGETS, SEEDS, st.sampled_from(ALIGN_MODES), st.randoms(use_true_random=False))
def test_a_draw_depends_on_its_own_session_only(counts, target, seed, mode, shuffler):
    """Another order of the sessions, or the session alone, or the seeds in numpy's types: the same copies."""
    ids = [f"s{place}" for place in range(len(counts))]
    whole = dict(zip(ids, align(counts, target, seed=seed, mode=mode, sessions=ids), strict=True))
    order = list(range(len(counts)))
    shuffler.shuffle(order)
    moved = align([counts[i] for i in order], target, seed=seed, mode=mode, sessions=[ids[i] for i in order])
    typed = (np.int64(seed[0]), np.int32(seed[1]), np.str_(seed[2]))
    for place, copies in zip(order, moved, strict=True):
        np.testing.assert_array_equal(copies, whole[ids[place]])
        (alone,) = align(np.array(counts)[[place]], target, seed=typed, mode=mode, sessions=[ids[place]])
        np.testing.assert_array_equal(alone, whole[ids[place]])


def test_sessions_are_numbered_when_they_have_no_ids():
    counts = [3, 9, 1]
    for with_ids, without in zip(
        align(counts, 5, seed=4, mode="sample", sessions=[0, 1, 2]),
        align(counts, 5, seed=(4,), mode="sample"),
        strict=True,
    ):
        np.testing.assert_array_equal(with_ids, without)


@pytest.mark.parametrize("changed", [(8, 3, 21, "sub"), (7, 4, 21, "sub"), (7, 3, 22, "sub"), (7, 3, 21, "coder")])
def test_every_part_of_the_seed_changes_the_draws(changed):
    before = np.concatenate(align([3] * 12 + [11] * 12, 8, seed=(7, 3, 21, "sub"), mode="sample"))
    after = np.concatenate(align([3] * 12 + [11] * 12, 8, seed=changed, mode="sample"))
    assert (before != after).any()


def test_sessions_of_one_seed_draw_differently():
    assert len({tuple(copies) for copies in align([4] * 20, 8, seed=1, mode="sample")}) > 5


def test_none_takes_every_trajectory_once_and_no_target():
    for count, copies in zip([0, 1, 20], align([0, 1, 20], None, seed=1, mode="none"), strict=True):
        np.testing.assert_array_equal(copies, np.ones(count))


@pytest.mark.parametrize(("count", "target"), [(2, 8), (5, 8), (7, 3), (3, 3)])
def test_sample_is_uniform_and_expected_is_its_mean(count, target):
    """Mean copies of each trajectory over 3,000 seeds: within 4.5 standard errors of D / d, and with their variance."""
    seeds = 3000
    copies = np.array([align([count], target, seed=(seed, "sub"), mode="sample")[0] for seed in range(seeds)])
    ((share, *_),) = align([count], target, seed=0, mode="expected")
    binomial, kept_or_not = (target - count) / count * (1 - 1 / count), share * (1 - share)
    variance = binomial if count < target else kept_or_not
    assert np.abs(copies.mean(axis=0) - share).max() <= 4.5 * math.sqrt(variance / seeds)
    assert copies.var(axis=0).mean() == pytest.approx(variance, rel=0.1)


def test_seed_is_a_known_hash():
    """The first 8 bytes of blake2b, so the same in every process; whole numbers by value, apart from strings."""
    assert seed_of(1, "sub", 2) == 0x8C386C73F116A7DE
    assert seed_of(np.int64(1), np.str_("sub"), np.uint8(2)) == seed_of(1, "sub", 2)
    assert len({seed_of(1, 2), seed_of(2, 1), seed_of("1", 2), seed_of(12), seed_of("12")}) == 5


@pytest.mark.parametrize(
    ("counts", "quantile", "target"),
    [
        ([3], 0.99, 3),
        ([0, 0, 0], 0.99, 1),
        ([1] * 99 + [7], 0.99, 1),
        ([1] * 98 + [7] * 2, 0.99, 7),
        ([1] * 99 + [7], 1.0, 7),
        (range(1, 101), 0.07, 7),  # 100 * 0.07 is above 7 in float64
        (range(1, 101), 0.29, 29),  # 100 * 0.29 is below 29
        ([4, 2, 0, 8], 0.5, 2),
        ([4, 2, 0, 8], 0.51, 4),
    ],
)
def test_target_is_the_smallest_that_covers_the_share(counts, quantile, target):
    assert target_of(counts, quantile) == target


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(0, 20), min_size=1, max_size=60), st.sampled_from([0.25, 0.5, 0.9, 0.99, 1.0]))
def test_target_by_its_definition(counts, quantile):
    target = target_of(counts, quantile)
    share = lambda size: sum(count <= size for count in counts) / len(counts)  # noqa: E731
    assert share(target) >= quantile
    assert target == 1 or share(target - 1) < quantile
    assert type(target) is int


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"mode": "samples"}, "mode='samples' is unknown: did you mean 'sample'"),
        ({"target": 0}, "target is 0: it must be a whole number of at least 1"),
        ({"target": 2.5}, "target is 2.5"),
        ({"target": None}, "target is None"),
        ({"counts": [1, -1]}, "count of session 1 is -1: it must be a whole number of at least 0"),
        ({"counts": [1.5, 1]}, "count of session 0 is 1.5"),
        ({"sessions": ["a"]}, "sessions has 1 ids for 2 counts"),
        ({"sessions": ["a", "a"]}, "sessions holds 'a' twice"),
        ({"seed": (1, None)}, "seed part None is a NoneType: give whole numbers and strings"),
        ({"sessions": [0.5, 1]}, "seed part 0.5 is a float"),
    ],
)
def test_wrong_input_is_refused(change, message):
    arguments = {"counts": [1, 2], "target": 2, "seed": 1, "mode": "sample"}
    arguments.update(change)
    with pytest.raises(ValueError, match=message):
        align(arguments.pop("counts"), arguments.pop("target"), **arguments)


@pytest.mark.parametrize(
    ("counts", "quantile", "message"),
    [
        ([], 0.99, "counts is empty"),
        ([1], 0, "quantile=0 must be above 0"),
        ([1], 1.1, "quantile=1.1"),
        ([1, -2], 0.5, "count is -2"),
    ],
)
def test_no_target_from_wrong_counts(counts, quantile, message):
    with pytest.raises(ValueError, match=message):
        target_of(counts, quantile)
