"""The curves of runs as a page that is one file, with the last values in a table."""

import math
from collections.abc import Sequence

from matplotlib import pyplot as plt

from moco_d2.transfer.report_content import GAP, Entry, Section, Table
from moco_d2.transfer.report_html import to_html
from moco_d2.visualization.curves import Panel, draw_curves, has
from moco_d2.visualization.metrics import Run
from moco_d2.visualization.style import to_svg


def curves_page(runs: Sequence[Run], panels: Sequence[Panel]) -> str:
    """HTML that asks nothing of the network.

    Args:
        panels: of :func:`moco_d2.visualization.curves.choose_panels`.
    """
    svgs, plots = {}, []
    for number, panel in enumerate(panels):
        figure = draw_curves(runs, [panel])
        name = f"panel-{number}"
        svgs[name] = to_svg(figure, name)
        plt.close(figure)
        plots.append((name, _seen(panel)))
    shown = {line.metric for panel in panels for line in panel.lines}
    others = sorted({metric for run in runs for metric in run.curves} - shown)
    sentences = [f"Not drawn: {', '.join(others)}."] if others else []
    names = ", ".join(run.name for run in runs)
    facts = {run.name: f"{run.path}, up to iteration {run.iterations}" for run in runs}
    sections = [
        Section("Curves", plots=plots),
        Section("Last values", sentences, [last_values(runs, panels)]),
    ]
    return to_html(f"Curves of {names}" if len(runs) < 4 else "Curves", facts, sections, svgs)


def last_values(runs: Sequence[Run], panels: Sequence[Panel]) -> Table:
    """A row per run, with the last value of each panel's bold metrics."""
    lines = [(panel, line) for panel in panels for line in panel.lines if line.look == "bold"]
    columns = ["run", "iteration", *(panel.title for panel, _ in lines)]
    rows = [
        [
            Entry(run.name),
            Entry(str(run.iterations), run.iterations),
            *(
                _last(run.curves[line.metric][1]) if has(run, line) else Entry(GAP)
                for _, line in lines
            ),
        ]
        for run in runs
    ]
    return Table("The last value of each metric", columns, rows)


def _last(values: list[float]) -> Entry:
    if math.isnan(values[-1]):
        return Entry(GAP)
    return Entry(f"{values[-1]:.4g}".replace("-", "−"), values[-1])


def _seen(panel: Panel) -> str:
    """What a panel shows, for who cannot see it."""
    labels = [line.label for line in panel.lines if line.label]
    return f"{panel.title} over the iterations" + f": {', '.join(labels)}" * (len(labels) > 1)
