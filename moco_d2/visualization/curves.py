"""Curves of one or several runs over their iterations."""

import fnmatch
from collections.abc import Sequence
from dataclasses import dataclass, replace

from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from moco_d2.errors import UserError
from moco_d2.visualization.metrics import Run
from moco_d2.visualization.style import INK, STYLE, colour, dashes

_PANEL = (4.2, 2.7)  # inches
_COLUMNS = 3
_FEW = 40  # points up to which each is marked


@dataclass(frozen=True)
class Line:
    """A metric in a panel: bold ones are what a panel is about, a reference is a known value."""

    metric: str
    label: str = ""
    look: str = "bold"  # "bold", "dashed", "faint" or "reference"


@dataclass(frozen=True)
class Panel:
    """Metrics that share an axis, and the value that it begins with, if any."""

    title: str
    lines: tuple[Line, ...]
    bottom: float | None = None


def _panel(title: str, *metrics: str, bottom: float | None = None) -> Panel:
    return Panel(title, tuple(Line(metric) for metric in metrics), bottom)


def _top_1_and_5(title: str, one: str, five: str) -> Panel:
    return Panel(title, (Line(one, "top 1"), Line(five, "top 5", "faint")), 0.0)


PANELS = (
    Panel("loss", (Line("total_loss", "loss"), Line("chance_level", "chance", "reference"))),
    _top_1_and_5("contrastive accuracy (%)", "contrastive_acc1", "contrastive_acc5"),
    _top_1_and_5("kNN accuracy (%)", "knn/top1", "knn/top5"),
    _panel("accuracy on training images (%)", "top1", bottom=0.0),
    _top_1_and_5("accuracy (%)", "classification/top1", "classification/top5"),
    _panel("AP of boxes", "bbox/AP", bottom=0.0),
    _panel("AP of masks", "segm/AP", bottom=0.0),
    _panel("AP of keypoints", "keypoints/AP", bottom=0.0),
    _panel("mean IoU (%)", "sem_seg/mIoU", bottom=0.0),
    Panel(
        "similarity (cosine)",
        (
            Line("positive_similarity", "positive"),
            Line("hardest_negative", "hardest negative", "dashed"),
            Line("negative_similarity", "negatives", "faint"),
        ),
    ),
    _panel("std of features (1: isotropic)", "feature_std", bottom=0.0),
    _panel("effective rank of features", "effective_rank", bottom=0.0),
    _panel("distance between encoders", "encoder_distance", bottom=0.0),
    _panel("age of the oldest key (steps)", "oldest_key_age", bottom=0.0),
    _panel("gradient norm", "gradient_norm", bottom=0.0),
    _panel("learning rate", "lr", bottom=0.0),
    _panel("images per second", "images_per_second", bottom=0.0),
)


def choose_panels(runs: Sequence[Run], patterns: Sequence[str] = ()) -> list[Panel]:
    """The panels that these runs have something for.

    Args:
        patterns: metrics, or shell patterns such as `bbox/*`, each metric in a panel of its own;
            none: those of `PANELS`.

    Raises:
        UserError: no run has a metric that is asked for.
    """
    known = sorted({metric for run in runs for metric in run.curves})
    if not patterns:
        panels = [panel for p in PANELS for panel in (p, *_of_sets(p, known))]
        shown = [p for p in panels if any(line.metric in known for line in p.lines)]
        return shown or choose_panels(runs, known)
    asked = []
    for pattern in patterns:
        matching = fnmatch.filter(known, pattern)
        if not matching:
            raise UserError(f"no run has a metric {pattern!r}; there are: {', '.join(known)}")
        asked += [metric for metric in matching if metric not in asked]
    return [_panel(metric, metric) for metric in asked]


def _of_sets(panel: Panel, known: Sequence[str]) -> list[Panel]:
    """The panel for each set where several are evaluated: `knn/top1` is `SET/knn/top1` then."""
    evaluated = [line.metric for line in panel.lines if "/" in line.metric]
    sets = {m[: -len(e) - 1] for m in known for e in evaluated if m.endswith(f"/{e}")}
    return [
        replace(
            panel,
            title=f"{panel.title}, {name}",
            lines=tuple(replace(line, metric=f"{name}/{line.metric}") for line in panel.lines),
        )
        for name in sorted(sets)
    ]


def draw_curves(
    runs: Sequence[Run], panels: Sequence[Panel] | None = None, columns: int = _COLUMNS
) -> Figure:
    """One figure with all panels, and a legend if there are several runs.

    Args:
        panels: of :func:`choose_panels`; None: its choice.
        columns: panels in a row.
    """
    panels = choose_panels(runs) if panels is None else panels
    columns = min(columns, len(panels))
    rows = -(-len(panels) // columns)
    legend_columns, legend_rows = _legend_size(runs, columns)
    width, height = columns * _PANEL[0], rows * _PANEL[1] + 0.22 * legend_rows
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(
            rows, columns, figsize=(width, height), layout="constrained", squeeze=False
        )
        for axis, panel in zip(axes.flat, panels, strict=False):
            _draw(axis, panel, runs)
        for axis in axes.flat[len(panels) :]:
            axis.remove()
        if len(runs) > 1:
            handles = [Line2D([], [], color=_colour(i), ls=_dashes(i)) for i in range(len(runs))]
            figure.legend(
                handles,
                [run.name for run in runs],
                loc="outside upper left",
                ncols=legend_columns,
                frameon=False,
            )
    return figure


def _legend_size(runs: Sequence[Run], columns: int) -> tuple[int, int]:
    """Columns that names find room in, and the rows that this makes; none for one run."""
    if len(runs) == 1:
        return 1, 0
    inches = 0.6 + 0.075 * max(len(run.name) for run in runs)
    fit = max(1, min(len(runs), int(columns * _PANEL[0] / inches)))
    return fit, -(-len(runs) // fit)


def _draw(axis: Axes, panel: Panel, runs: Sequence[Run]) -> None:
    handles = {}
    for line in panel.lines:
        drawn = [(i, run.curves[line.metric]) for i, run in enumerate(runs) if has(run, line)]
        shared = line.look == "reference" and len({v for _, (_, vs) in drawn for v in vs}) == 1
        for i, (iterations, values) in drawn:
            axis.plot(iterations, values, **_look(line, i, len(values), shared))
        if drawn and line.label:
            style = {"reference": ":", "dashed": "--"}.get(line.look, "-")
            handles[line.label] = Line2D([], [], color=INK, ls=style, **_weight(line))
    axis.set_title(panel.title, loc="left", fontsize=10.5, fontweight="medium")
    # The same range in all panels, whatever is written how often.
    axis.set_xlim(0, 1.02 * max(1, *(run.iterations for run in runs)))
    axis.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    axis.set_xlabel("iteration")
    axis.grid(alpha=0.25)
    if panel.bottom is not None:
        top = axis.get_ylim()[1]
        axis.set_ylim(panel.bottom, top if top > panel.bottom else panel.bottom + 1)
    if len(handles) > 1:
        axis.legend(handles.values(), handles.keys(), frameon=False, loc="best")


def has(run: Run, line: Line) -> bool:
    return line.metric in run.curves


def _look(line: Line, i: int, points: int, shared: bool) -> dict:
    """How run i's line looks; a reference that is the same for all runs belongs to none."""
    if line.look == "reference":
        return {"color": INK if shared else _colour(i), "ls": ":", **_weight(line)}
    marked = {"marker": "o", "markersize": 3} if points <= _FEW else {}
    style = "--" if line.look == "dashed" else _dashes(i)
    return {"color": _colour(i), "ls": style, **marked, **_weight(line)}


def _weight(line: Line) -> dict:
    return {
        "bold": {"linewidth": 1.7},
        "dashed": {"linewidth": 1.2},
        "faint": {"linewidth": 1.1, "alpha": 0.5},
        "reference": {"linewidth": 1.2},
    }[line.look]


def _colour(i: int) -> str:
    return colour(i + 1)  # grey is for what is compared against


def _dashes(i: int) -> str:
    return dashes(i + 1)
