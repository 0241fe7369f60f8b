"""avg@k and pass@k against the closed form, brute force and hand-made sessions."""

from itertools import combinations

import pytest

from verl_drmas.trainer.validation import ks, pass_at_k, validation_metrics


@pytest.mark.parametrize("n", range(1, 8))
def test_pass_at_k_is_the_share_of_all_draws_with_a_right_one(n):
    for correct in range(n + 1):
        sessions = [1] * correct + [0] * (n - correct)
        for k in range(1, n + 1):
            draws = list(combinations(sessions, k))
            assert pass_at_k(n, correct, k) == pytest.approx(sum(map(any, draws)) / len(draws), abs=1e-12)


def test_pass_at_k_ends():
    assert pass_at_k(16, 0, 8) == 0.0
    assert pass_at_k(16, 9, 8) == 1.0
    assert pass_at_k(16, 4, 1) == 0.25


@pytest.mark.parametrize(("n", "correct", "k"), [(4, 5, 1), (4, -1, 1), (4, 1, 5), (4, 1, 0)])
def test_pass_at_k_refuses_what_has_no_meaning(n, correct, k):
    with pytest.raises(ValueError, match=f"n={n}, correct={correct}, k={k}"):
        pass_at_k(n, correct, k)


@pytest.mark.parametrize(("n", "expected"), [(1, [1]), (4, [1, 2, 4]), (6, [1, 2, 4, 6]), (16, [1, 2, 4, 8, 16])])
def test_reported_k(n, expected):
    assert ks(n) == expected


def sessions(**prompts):
    """(sources, uids, scores) of sessions given by prompt; a prompt's name begins with its source."""
    sources, uids, scores = [], [], []
    for uid, values in prompts.items():
        for value in values:
            sources.append(uid.split("_")[0])
            uids.append(uid)
            scores.append(value)
    return sources, uids, scores


def expected(n, *uids):
    return {(uid.split("_")[0], uid): n for uid in uids}


def test_each_source_on_its_own():
    data = sessions(aime_1=[1, 0, 0, 0], aime_2=[0, 0, 0, 0], amc_1=[1, 1, 1, 1])
    metrics = validation_metrics(*data, expected(4, "aime_1", "aime_2", "amc_1"))
    assert metrics == {
        "val/aime/avg@4": 0.125,
        "val/aime/pass@1": 0.125,
        "val/aime/pass@2": 0.25,
        "val/aime/pass@4": 0.5,
        "val/amc/avg@4": 1.0,
        "val/amc/pass@1": 1.0,
        "val/amc/pass@2": 1.0,
        "val/amc/pass@4": 1.0,
        "val/aime/failed_sessions": 0.0,
        "val/amc/failed_sessions": 0.0,
    }


def test_order_of_sessions_does_not_matter():
    data = sessions(a_1=[1, 0], a_2=[1, 1])
    counts = expected(2, "a_1", "a_2")
    backwards = [list(reversed(column)) for column in data]
    assert validation_metrics(*data, counts) == validation_metrics(*backwards, counts)


def test_a_failed_session_is_counted_and_neither_right_nor_wrong():
    metrics = validation_metrics(*sessions(a_1=[1, 0, 1], a_2=[0, 0, 0, 1]), expected(4, "a_1", "a_2"))
    assert metrics["val/a/failed_sessions"] == 1.0
    assert metrics["val/a/avg@4"] == pytest.approx((2 / 3 + 1 / 4) / 2)
    assert metrics["val/a/pass@2"] == pytest.approx((1.0 + 0.5) / 2)  # of three with two right, and four with one
    assert metrics["val/a/pass@4"] == 1.0  # the one prompt that has four


def test_a_source_of_failures_only():
    metrics = validation_metrics(*sessions(b_1=[1]), expected(1, "a_1", "a_2", "b_1"))
    assert metrics["val/a/failed_sessions"] == 2.0
    assert not [name for name in metrics if name.startswith("val/a/") and "failed" not in name]


def test_no_k_without_a_prompt_that_has_as_many_sessions():
    metrics = validation_metrics(*sessions(a_1=[1, 0]), expected(4, "a_1"))
    assert "val/a/pass@2" in metrics
    assert "val/a/pass@4" not in metrics


def test_a_fractional_score_enters_avg_as_it_is_and_pass_only_when_whole():
    metrics = validation_metrics(*sessions(a_1=[0.5, 0.75]), expected(2, "a_1"))
    assert metrics["val/a/avg@2"] == 0.625
    assert metrics["val/a/pass@2"] == 0.0
    assert validation_metrics(*sessions(a_1=[0.5, 1 - 1e-12]), expected(2, "a_1"))["val/a/pass@2"] == 1.0


def test_numpy_ids_and_scores():
    np = pytest.importorskip("numpy")
    sources, uids, scores = (np.array(c, dtype=object) for c in sessions(a_1=[1.0, 0.0]))
    assert validation_metrics(sources, uids, scores, expected(2, "a_1"))["val/a/pass@2"] == 1.0
