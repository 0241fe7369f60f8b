"""avg@k and pass@k of hand-made sessions; `tests/evaluation/test_score.py` has the rule that both share."""

import pytest

from verl_drmas.evaluation.score import score_source
from verl_drmas.trainer.validation import validation_metrics


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


def test_a_validation_says_what_an_evaluation_of_the_same_sessions_says():
    prompts = {"a_1": [1, 0, 1, 1, 0, 0], "a_2": [0, 0, 0.5, 0, 1, 0], "a_3": [1, 1, 1]}
    metrics = validation_metrics(*sessions(**prompts), expected(6, *prompts))
    scores = score_source([prompts], 6, [1, 2, 4, 6])
    assert {f"val/a/{name}": score.value for name, score in scores.items()} | {"val/a/failed_sessions": 3.0} == metrics
