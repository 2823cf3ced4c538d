"""The report of a benchmark: results.json, results.csv, report.md, report.html and plots."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from matplotlib import pyplot as plt
from matplotlib.figure import Figure

from moco_d2.checkpoint.files import replaced_file
from moco_d2.transfer.cells import write_json
from moco_d2.transfer.report_content import content, row_word
from moco_d2.transfer.report_html import to_html
from moco_d2.transfer.report_plots import draw_bars, draw_curves
from moco_d2.transfer.report_text import to_csv, to_markdown
from moco_d2.transfer.summary import read_results, shown_metrics
from moco_d2.visualization.style import to_svg

BARS = "{metric} by {row}. Bars: means; whiskers: ± one standard deviation; dots: trials"
PUBLISHED = "; triangles: published, hollow where unverified"
CURVES = "{metric} over the iterations. Lines: means of the trials; bands: ± one standard deviation"


def report(folder: str | Path) -> Path:
    """Write everything that says what a benchmark found, from what its folder holds now.

    Args:
        folder: of a benchmark or an ablation, with a results.json and cells, finished or not.

    Returns:
        path of report.html.

    Raises:
        UserError: there is no results.json.
    """
    root = Path(folder)
    results = read_results(root)
    write_json(root / "results.json", results)
    (root / "plots").mkdir(exist_ok=True)
    named: dict[str, list[tuple[str, str]]] = {}
    svgs = {}
    for task in results["tasks"]:
        for name, seen, figure in _draw(results, task, root):
            figure.savefig(root / f"plots/{name}.png", dpi=160, facecolor="white")
            svgs[name] = to_svg(figure, name)
            plt.close(figure)
            named.setdefault(task["name"], []).append((name, seen))
    sections = content(results, named)
    title = results.get("title", "Transfer benchmark")
    facts = _facts(results)
    _write(root / "results.csv", to_csv(results))
    _write(root / "report.md", to_markdown(title, facts, sections))
    _write(root / "report.html", to_html(title, facts, sections, svgs))
    return root / "report.html"


def _draw(
    results: dict[str, Any], task: dict[str, Any], root: Path
) -> Iterator[tuple[str, str, Figure]]:
    """(file name without ending, description, figure) of a task's plots."""
    for metric in shown_metrics(task):
        rows = [r for r in results["summary"] if (r["task"], r["metric"]) == (task["name"], metric)]
        if not rows:
            continue
        drawn = {**task, "metric": metric}
        words = [task["name"], *([metric] if metric != task["metric"] else [])]
        name = re.sub(r"[^\w.-]+", "_", "-".join(words))
        published = any(row["published"] for row in rows)
        seen = BARS.format(metric=metric, row=row_word([task])) + PUBLISHED * published
        yield f"{name}-bars", seen, draw_bars(results, drawn)
        curves = draw_curves(results, drawn, root)
        if curves is not None:
            yield f"{name}-curves", CURVES.format(metric=metric), curves


def _facts(results: dict[str, Any]) -> dict[str, str]:
    """How the benchmark was run, in words."""
    facts = {"date": str(results["date"]), "command": results["command"]}
    facts.update({name: str(value) for name, value in results["environment"].items()})
    for init in results["inits"]:
        weights = init.get("weights") or "none"
        digest = f", sha256 {init['sha256']}" if init.get("sha256") else ""
        facts[f"weights of {init['name']}"] = f"{weights}{digest}"
    return facts


def _write(path: Path, text: str) -> None:
    with replaced_file(str(path)) as aside:
        Path(aside).write_text(text)
