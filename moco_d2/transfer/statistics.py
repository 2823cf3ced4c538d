"""What trials add up to: spreads, differences between initialisations, verdicts."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from moco_d2.transfer.published import Published

WITHIN, ABOVE, BELOW = "within", "above", "below"
# Published values are rounded to a tenth.
_ROUNDING = 0.05


def spread(values: Sequence[float]) -> dict[str, Any]:
    """Mean and sample standard deviation (n − 1) of trials.

    Args:
        values: at least one.

    Returns:
        mean, std (None for a single trial) and n.
    """
    std = float(np.std(values, ddof=1)) if len(values) > 1 else None
    return {"mean": float(np.mean(values)), "std": std, "n": len(values)}


def difference(trials: Mapping[int, float], others: Mapping[int, float]) -> dict[str, Any] | None:
    """By how much the mean of trials is above that of others, and how sure that is.

    Runs of one seed see the same images in the same order (and, with few labels, the same subset),
    so those are compared with each other: with d the differences of the n seeds that both have,
    mean(d) ± std(d) / √n. Fewer than two common seeds, but at least two trials on each side: the
    difference of the means ± √(std₁² / n₁ + std₂² / n₂) (Welch).

    Args:
        trials, others: seed -> result.

    Returns:
        mean, se (standard error, None where a side has one trial only), n (pairs, or the trials of
        the smaller side) and paired; None without any trial on one side.
    """
    if not trials or not others:
        return None
    common = sorted(trials.keys() & others.keys())
    if len(common) > 1 or (common and min(len(trials), len(others)) == 1):
        pairs = spread([trials[seed] - others[seed] for seed in common])
        se = None if pairs["std"] is None else pairs["std"] / math.sqrt(pairs["n"])
        return {"mean": pairs["mean"], "se": se, "n": pairs["n"], "paired": True}
    first, second = spread(list(trials.values())), spread(list(others.values()))
    se = None
    if first["n"] > 1 and second["n"] > 1:
        se = math.hypot(_error(first["std"], first["n"]), _error(second["std"], second["n"]))
    n = min(first["n"], second["n"])
    return {"mean": first["mean"] - second["mean"], "se": se, "n": n, "paired": False}


def verdict(measured: Mapping[str, Any], published: Published) -> dict[str, Any]:
    """Whether a mean agrees with a published one.

    The published value is itself a mean of runs, and rounded. With std and n of the measured
    trials, std_p of one published run (the measured one where no source states it) and n_p
    published runs, the mean is `within` where it is at most
    2 · √(std² / n + std_p² / n_p) + 0.05 away.

    Args:
        measured: what `spread` returns.

    Returns:
        verdict (`within`, `above`, `below`; None for a single trial, which has no spread) and
        tolerance (None likewise).
    """
    if measured["std"] is None:
        return {"verdict": None, "tolerance": None}
    std = measured["std"] if published.std is None else published.std
    error = math.hypot(_error(measured["std"], measured["n"]), _error(std, published.runs))
    tolerance = 2 * error + _ROUNDING
    distance = measured["mean"] - published.value
    if abs(distance) <= tolerance:
        return {"verdict": WITHIN, "tolerance": tolerance}
    return {"verdict": ABOVE if distance > 0 else BELOW, "tolerance": tolerance}


def _error(std: float, n: int) -> float:
    return std / math.sqrt(n)
