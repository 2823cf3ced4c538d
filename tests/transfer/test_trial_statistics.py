"""Spreads, differences and verdicts against values worked out by hand."""

import math

import numpy as np
import pytest

from moco_d2.transfer.published import Published
from moco_d2.transfer.statistics import difference, spread, verdict


def published(value, std=None, runs=1):
    return Published("random", "bbox/AP", value, std, runs, "a paper", None)


def test_spread_is_the_sample_standard_deviation():
    # Deviations from 4: -2, 0, 2; their squares add up to 8, over n - 1 = 2.
    assert spread([2.0, 4.0, 6.0]) == {"mean": 4.0, "std": 2.0, "n": 3}


def test_a_single_trial_has_no_spread():
    assert spread([7.5]) == {"mean": 7.5, "std": None, "n": 1}


def test_difference_pairs_the_trials_of_a_seed():
    # Seeds 1, 2, 3 differ by 1, 2, 3: mean 2, std 1, so the error is 1 / sqrt(3). Seed 9 is left
    # out. Unpaired, the error would be 28 times as large.
    trials = {1: 11.0, 2: 42.0, 3: 93.0, 9: 0.0}
    others = {3: 90.0, 1: 10.0, 2: 40.0}
    result = difference(trials, others)
    assert result == {
        "mean": pytest.approx(2.0),
        "se": pytest.approx(1 / math.sqrt(3)),
        "n": 3,
        "paired": True,
    }


def test_difference_of_trials_with_other_seeds_is_welchs():
    trials, others = {1: 3.0, 2: 5.0, 3: 7.0}, {4: 1.0, 5: 2.0}
    a, b = (np.array(list(x.values()), dtype=np.float64) for x in (trials, others))
    error = np.sqrt(a.var(ddof=1) / 3 + b.var(ddof=1) / 2)  # sqrt(4 / 3 + 0.5 / 2)
    assert error == pytest.approx(math.sqrt(4 / 3 + 0.25))
    result = difference(trials, others)
    assert result == {"mean": 3.5, "se": pytest.approx(error), "n": 2, "paired": False}


@pytest.mark.parametrize(
    "trials, others, mean, paired",
    [
        ({1: 5.0}, {1: 3.0}, 2.0, True),
        ({1: 5.0}, {2: 3.0}, 2.0, False),
        ({1: 5.0}, {1: 4.0, 2: 0.0}, 1.0, True),
        ({1: 5.0}, {2: 4.0, 3: 0.0}, 3.0, False),
    ],
)
def test_difference_of_single_trials_has_no_error(trials, others, mean, paired):
    n = 1
    assert difference(trials, others) == {"mean": mean, "se": None, "n": n, "paired": paired}


def test_no_difference_to_nothing():
    assert difference({1: 5.0}, {}) is None
    assert difference({}, {1: 5.0}) is None


@pytest.mark.parametrize(
    "value, expected",
    [(55.60, "above"), (55.61, "within"), (56.39, "within"), (56.40, "below")],
)
def test_verdict_allows_two_standard_errors_and_the_rounding(value, expected):
    # std 0.3 of 4 trials and 0.2 of 5 published ones: 2 sqrt(0.0225 + 0.008) + 0.05 = 0.3993.
    measured = {"mean": 56.0, "std": 0.3, "n": 4}
    result = verdict(measured, published(value, std=0.2, runs=5))
    assert result == {"verdict": expected, "tolerance": pytest.approx(0.39928, abs=1e-5)}


def test_verdict_takes_the_measured_spread_where_none_was_published():
    # sqrt(1 / 4 + 1 / 1) = 1.118: 2.286 is allowed.
    measured = {"mean": 40.0, "std": 1.0, "n": 4}
    assert verdict(measured, published(42.28))["verdict"] == "within"
    assert verdict(measured, published(42.29))["verdict"] == "below"
    assert verdict(measured, published(37.71))["verdict"] == "above"


def test_a_single_trial_gets_no_verdict():
    measured = {"mean": 40.0, "std": None, "n": 1}
    assert verdict(measured, published(40.0)) == {"verdict": None, "tolerance": None}
