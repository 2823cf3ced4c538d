"""Plots of a report: bars of the trials' means, and a metric over the iterations."""

from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import pyplot as plt
from matplotlib.figure import Figure

from moco_d2.transfer.summary import finished, inits_of, read_curve
from moco_d2.visualization.style import INK, STYLE, colour, dashes

_WIDTH = 4.8  # inches


def draw_bars(results: dict[str, Any], task: dict[str, Any]) -> Figure:
    """Mean, spread and every trial of the first metric, by initialisation; published values."""
    rows = {r["init"]: r for r in _rows(results, task)}
    inits = [init["name"] for init in inits_of(results, task)]
    with plt.rc_context(STYLE):
        figure, axis = plt.subplots(figsize=(_WIDTH, 0.75 + 0.4 * len(inits)), layout="constrained")
        for i, name in enumerate(inits):
            if name not in rows:
                axis.annotate("no result", (0, i), (6, 0), textcoords="offset points", va="center")
                continue
            row = rows[name]
            axis.barh(i, row["mean"], height=0.56, color=colour(i), alpha=0.5, zorder=1)
            top = row["mean"]
            if row["std"] is not None:
                # Thin and capped: the dots of the trials stay visible.
                axis.errorbar(row["mean"], i, xerr=row["std"], color=INK, capsize=3, zorder=3)
                top = max(row["mean"] + row["std"], *row["values"])
            offsets = np.linspace(-0.16, 0.16, row["n"]) if row["n"] > 1 else [0.0]
            axis.scatter(row["values"], i + np.array(offsets), s=13, color=colour(i), zorder=2)
            if row["published"]:
                # Points at the bar from above, so that it covers no trial.
                face = INK if row["published"]["verified"] else "none"
                place = ([row["published"]["value"]], [i - 0.37])
                axis.scatter(*place, s=26, marker="v", facecolor=face, edgecolors=INK, zorder=4)
            axis.annotate(
                _short(row["mean"]), (top, i), (9, 0), textcoords="offset points", va="center"
            )
        axis.set_yticks(range(len(inits)), inits)
        axis.invert_yaxis()
        axis.set_ylim(len(inits) - 0.4, -0.6)
        axis.set_xlim(left=0)
        axis.margins(x=0.12)
        axis.tick_params(axis="y", length=0)
        axis.set_xlabel(task["metric"])
    return figure


def draw_curves(results: dict[str, Any], task: dict[str, Any], root: Path) -> Figure | None:
    """The first metric over the iterations: mean and, of several trials, ± one std.

    Returns:
        None where no run was evaluated more than once.
    """
    lines = []
    for i, init in enumerate(inits_of(results, task)):
        cells = finished(results, task["name"], init["name"])
        curves = [read_curve(root / cell["folder"], task["metric"]) for cell in cells]
        curves = [curve for curve in curves if curve]
        common = sorted(set.intersection(*map(set, curves))) if curves else []
        if len(common) > 1:
            values = np.array([[curve[t] for t in common] for curve in curves])  # (trials, times)
            lines.append((i, init["name"], common, values))
    if not lines:
        return None
    with plt.rc_context(STYLE):
        figure, axis = plt.subplots(figsize=(_WIDTH, 2.6 + 0.1 * len(lines)), layout="constrained")
        for i, name, iterations, values in lines:
            mean = values.mean(axis=0)
            axis.plot(
                iterations, mean, dashes(i), color=colour(i), marker="o", markersize=3, label=name
            )
            if len(values) > 1:
                std = values.std(axis=0, ddof=1)
                axis.fill_between(
                    iterations, mean - std, mean + std, color=colour(i), alpha=0.2, linewidth=0
                )
        axis.set_ylim(bottom=0)
        axis.set_xlim(left=0)
        axis.set_xlabel("iteration")
        axis.set_ylabel(task["metric"])
        axis.grid(alpha=0.25)
        columns = 3 if max(len(name) for _, name, _, _ in lines) < 15 else 2
        figure.legend(loc="outside upper left", ncols=columns, frameon=False, columnspacing=1.2)
    return figure


def _rows(results: dict[str, Any], task: dict[str, Any]) -> list[dict[str, Any]]:
    wanted = (task["name"], task["metric"])
    return [row for row in results["summary"] if (row["task"], row["metric"]) == wanted]


def _short(value: float) -> str:
    return f"{value:.1f}" if value >= 1 else f"{value:.2g}"
