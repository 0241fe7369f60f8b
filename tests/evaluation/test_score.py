"""pass@k against its closed form, against every possible draw, and the tables' means and standard errors."""

import itertools
import math
import random
from fractions import Fraction

import numpy as np
import pytest

from verl_drmas.evaluation.score import macro_average, pass_at_k, score_source, usual_ks


def closed_form(n, c, k):
    """1 - prod_{i=0}^{k-1} (n - c - i) / (n - i), in fractions."""
    miss = Fraction(1)
    for i in range(k):
        miss *= Fraction(max(n - c - i, 0), n - i)
    return 1 - miss


def test_the_closed_form_on_random_data():
    draw = random.Random(0)
    for _ in range(500):
        n = draw.randint(1, 300)
        c, k = draw.randint(0, n), draw.randint(1, n)
        assert pass_at_k(n, c, k) == float(closed_form(n, c, k))  # to the last bit


@pytest.mark.parametrize("n", range(1, 8))
def test_every_draw_of_small_n(n):
    for c, k in itertools.product(range(n + 1), range(1, n + 1)):
        sessions = [1] * c + [0] * (n - c)
        draws = list(itertools.combinations(sessions, k))
        assert pass_at_k(n, c, k) == pytest.approx(sum(map(any, draws)) / len(draws), abs=1e-15)


def test_it_is_unbiased_for_more_sessions_than_k():
    """The mean over binomial n is the chance that one of k independent sessions is right."""
    n, k, p = 16, 4, 0.3
    mean = math.fsum(math.comb(n, c) * p**c * (1 - p) ** (n - c) * pass_at_k(n, c, k) for c in range(n + 1))
    assert mean == pytest.approx(1 - (1 - p) ** k, abs=1e-12)


def test_small_chances_keep_their_digits():
    n = 10**6
    assert pass_at_k(n, 1, 1) == 1 / n
    assert pass_at_k(n, 1, 7) == pytest.approx(7 / n, rel=1e-15)
    assert 1 - (1 - 1 / n) != 1 / n  # what subtracting from 1 would give


@pytest.mark.parametrize("n, c, k", [(4, 5, 1), (4, -1, 1), (4, 2, 5), (4, 2, 0)])
def test_impossible_counts_are_refused(n, c, k):
    with pytest.raises(ValueError, match="pass@k needs"):
        pass_at_k(n, c, k)


@pytest.mark.parametrize("n, ks", [(1, []), (2, [2]), (3, [2, 3]), (8, [2, 4, 8]), (16, [2, 4, 8, 16])])
def test_ks_that_are_reported(n, ks):
    assert usual_ks(n) == ks


def test_a_sources_means_and_errors():
    run = {0: [1, 0, 1, 1], 1: [0, 0, 0, 0], 2: [1, 1, 1, 1]}
    scores = score_source([run], 4, [2, 4])
    averages = np.array([0.75, 0.0, 1.0])
    assert scores["avg@4"].value == pytest.approx(averages.mean())
    assert scores["avg@4"].error == pytest.approx(averages.std(ddof=1) / np.sqrt(3))
    assert scores["pass@2"].value == pytest.approx((1 + 0 + 1) / 3)
    assert scores["pass@4"].value == pytest.approx(2 / 3)
    assert (scores["avg@4"].prompts, scores["avg@4"].runs_error) == (3, None)


def test_failed_sessions_are_neither_right_nor_wrong():
    run = {0: [1, 1], 1: [1], 2: []}
    scores = score_source([run], 2, [2])
    assert (scores["avg@2"].value, scores["avg@2"].prompts) == (1.0, 2)
    assert (scores["pass@2"].value, scores["pass@2"].prompts, scores["pass@2"].error) == (1.0, 1, None)
    assert score_source([{0: []}], 2, [2]) == {}


def test_rewards_between_right_and_wrong_enter_the_average_alone():
    scores = score_source([{0: [0.5, 0.0], 1: [1.0, 0.5]}], 2, [2])
    assert (scores["avg@2"].value, scores["pass@2"].value) == (0.5, 0.5)


def test_several_runs_are_a_mean_of_runs():
    runs = [{0: [1], 1: [0]}, {0: [1], 1: [1]}, {0: [0], 1: [0]}]
    score = score_source(runs, 1, [])["avg@1"]
    assert score.runs == (0.5, 1.0, 0.0)
    assert score.value == pytest.approx(0.5)
    assert score.runs_error == pytest.approx(np.std([0.5, 1.0, 0.0], ddof=1) / np.sqrt(3))
    assert score.error == pytest.approx(np.std([2 / 3, 1 / 3], ddof=1) / np.sqrt(2))  # over prompts
    assert score_source([{0: [1]}, {}], 1, [])["avg@1"].runs == (1.0, None)


def test_the_macro_average_weighs_sources_alike():
    large = score_source([{i: [1, 1] for i in range(9)} | {9: [0, 0]}], 2, [2])
    small = score_source([{0: [1, 0], 1: [0, 0]}], 2, [2])
    macro = macro_average([large, small])
    assert macro["avg@2"].value == pytest.approx((0.9 + 0.25) / 2)
    assert macro["avg@2"].error == pytest.approx(math.hypot(large["avg@2"].error, small["avg@2"].error) / 2)
    assert macro["avg@2"].prompts == 12
    lonely = score_source([{0: [1, 1]}], 2, [2])
    assert macro_average([large, lonely])["avg@2"].error is None
    assert list(macro_average([large, {"avg@2": small["avg@2"]}])) == ["avg@2"]
    assert macro_average([]) == {}
