"""What a report says, in tables and sentences, before it is Markdown or HTML."""

from dataclasses import dataclass, field
from typing import Any

from moco_d2.transfer.cells import FAILED
from moco_d2.transfer.progress import duration
from moco_d2.transfer.published import Published, PublishedTask, published_results
from moco_d2.transfer.summary import (
    RANDOM,
    SUPERVISED,
    count_trials,
    finished,
    inits_of,
    shown_metrics,
)

GAP = "–"  # a field that has no value


@dataclass(frozen=True)
class Entry:
    """A field of a table: `value` is the number that `text` rounds, `tone` a hint for its look."""

    text: str
    value: float | None = None
    tone: str = ""  # a class of report.css, such as "failed" or "unverified"


@dataclass(frozen=True)
class Table:
    caption: str
    columns: list[str]
    rows: list[list[Entry]]
    detail: bool = False  # may be folded away


@dataclass(frozen=True)
class Section:
    """A heading with what is below it; `plots` are file names without ending, and what is seen."""

    title: str
    sentences: list[str] = field(default_factory=list)
    tables: list[Table] = field(default_factory=list)
    plots: list[tuple[str, str]] = field(default_factory=list)
    failures: list[tuple[list[str], str]] = field(default_factory=list)  # runs, their error


def content(results: dict[str, Any], plots: dict[str, list[tuple[str, str]]]) -> list[Section]:
    """All sections of a report.

    Args:
        results: see `moco_d2.transfer.summary.read_results`.
        plots: by task: file name without ending, description.
    """
    sections = [_overview(results)]
    sections += [_task(results, task, plots.get(task["name"], [])) for task in results["tasks"]]
    return [*sections, _runs(results), _reading(results)]


def measured(row: dict[str, Any]) -> Entry:
    """mean ± std, or the value of a single trial."""
    return Entry(_number(row["mean"], row["std"]), row["mean"])


def _number(value: float, spread: float | None, sign: str = "") -> str:
    text = f"{value:{sign}.2f}".replace("-", "−")
    return text if spread is None else f"{text} ± {spread:.2f}"


def row_word(tasks: list[dict[str, Any]]) -> str:
    """What the rows of these tasks' tables are: grids that name their own have variants."""
    return "variant" if any("inits" in task for task in tasks) else "initialisation"


def _overview(results: dict[str, Any]) -> Section:
    tasks = results["tasks"]
    columns = ["initialisation", *(f"{task['name']}: {task['metric']}" for task in tasks)]
    rows = [
        [Entry(init["name"]), *(_primary(results, task, init["name"]) for task in tasks)]
        for init in results["inits"]
    ]
    expected = sum(len(inits_of(results, task)) for task in tasks) * count_trials(results)
    done = sum(
        len(finished(results, t["name"], i["name"])) for t in tasks for i in results["inits"]
    )
    failed = [cell for cell in results["cells"] if cell["status"] == FAILED]
    missing = expected - done - len(failed)
    counts = f"{done} of {expected} runs are done"
    counts += f", {len(failed)} failed" * bool(failed) + f", {missing} missing" * bool(missing)
    spent = sum(cell["seconds"] for cell in results["cells"] if not cell.get("same_run_as"))
    caption = "Mean ± standard deviation of the trials; only one trial: its value"
    return Section(
        "Results",
        [f"{counts}." + f" Their times add up to {duration(spent)}." * bool(spent)],
        # Grids have no rows in common.
        [Table(caption, columns, rows)] if row_word(tasks) == "initialisation" else [],
        failures=_by_error(failed),
    )


def _by_error(failed: list[dict[str, Any]]) -> list[tuple[list[str], str]]:
    """Failed runs, those that ended in the same way together."""
    runs: dict[str, tuple[list[str], str]] = {}
    for cell in failed:
        error = (cell["error"] or "").strip() or "no error was recorded"
        runs.setdefault(last_line(error), ([], error))[0].append(cell["folder"])
    return list(runs.values())


def last_line(error: str) -> str:
    """The line of a traceback that says what went wrong."""
    return error.strip().splitlines()[-1]


def _primary(results: dict[str, Any], task: dict, init: str) -> Entry:
    """The first metric of a task and an initialisation, or why there is none."""
    row = _row(results, task["name"], init, task["metric"])
    if row is not None:
        entry, trials = measured(row), count_trials(results)
        return (
            entry
            if row["n"] == trials
            else Entry(f"{entry.text} ({row['n']} of {trials})", entry.value)
        )
    cells = [c for c in results["cells"] if (c["task"], c["init"]) == (task["name"], init)]
    if any(cell["status"] == FAILED for cell in cells):
        return Entry("failed", tone="failed")
    return Entry("not measured" if cells else "missing", tone="missing")


def _task(results: dict[str, Any], task: dict, plots: list[tuple[str, str]]) -> Section:
    name, published = task["name"], published_results().tasks.get(task["name"])
    protocol = task.get("protocol") or (published.protocol if published else "")
    sentences = [f"{protocol}."] if protocol else []
    shown = shown_metrics(task)
    tables = [_comparison(results, task, [metric], metric) for metric in shown]
    others = [metric for metric in task["metrics"] if metric not in shown]
    table = _comparison(results, task, others, "Other metrics", detail=True)
    tables += [table] if table.rows else []
    if published and task["departures"]:
        reasons = "; ".join(task["departures"])
        sentences.append(
            f"No published number is shown: these runs follow another protocol ({reasons})."
        )
    elif published and any(row["task"] == name for row in results["summary"]):
        tables.append(_published_table(task, published))
    return Section(name, sentences, tables, plots)


def _comparison(
    results: dict[str, Any], task: dict, metrics: list[str], title: str, detail: bool = False
) -> Table:
    """One row for each metric and initialisation; columns only for what there is to compare."""
    kinds = [
        kind
        for kind in (RANDOM, SUPERVISED)
        if any(r[f"diff_{kind}"] for r in results["summary"] if r["task"] == task["name"])
    ]
    compared = any(r["published"] for r in results["summary"] if r["task"] == task["name"])
    columns = ["metric"] * detail + [row_word([task]), "mean ± std", "trials"]
    columns += [f"to {kind}" for kind in kinds]
    columns += ["published", "verdict"] * compared + ["source"] * (compared and not detail)
    rows = []
    for metric in metrics:
        for init in inits_of(results, task):
            row = _row(results, task["name"], init["name"], metric)
            if row is None and detail:
                continue
            entries = [Entry(metric)] * detail + [Entry(init["name"])]
            if row is None:
                entries.append(_primary(results, {**task, "metric": metric}, init["name"]))
                entries += [Entry(GAP)] * (len(columns) - len(entries))
            else:
                entries += [measured(row), Entry(str(row["n"]), row["n"])]
                entries += [_difference(row[f"diff_{kind}"]) for kind in kinds]
                if compared:
                    entries += _published_entries(row["published"], with_source=not detail)
            rows.append(entries)
    return Table(title, columns, rows, detail)


def _difference(difference: dict[str, Any] | None) -> Entry:
    if difference is None:
        return Entry(GAP)
    return Entry(_number(difference["mean"], difference["se"], "+"), difference["mean"])


def _published_entries(published: dict[str, Any] | None, *, with_source: bool) -> list[Entry]:
    if published is None:
        return [Entry(GAP)] * (2 + with_source)
    text, tone = str(published["value"]), ""
    if not published["verified"]:
        text, tone = f"{text} (unverified)", "unverified"
    verdict = published["verdict"]
    return [
        Entry(text, published["value"], tone),
        Entry(verdict or "one trial", tone=verdict or "missing"),
        *[Entry(published["source"], tone="source")] * with_source,
    ]


def _published_table(task: dict[str, Any], published: PublishedTask) -> Table:
    """Everything that was published for this protocol, a row for each set of runs."""
    words, metrics = published_results().inits, task["metrics"]
    rows: dict[tuple, dict[str, Published]] = {}
    for found in published.values:
        rows.setdefault((found.init, found.source, found.runs), {})[found.metric] = found
    return Table(
        "Published for this protocol",
        ["initialisation", *metrics, "runs", "source", "read in"],
        [
            [
                Entry(f"{init}: {words[init]}"),
                *(_published_value(values.get(metric)) for metric in metrics),
                Entry(str(runs), runs),
                Entry(source, tone="source"),
                Entry(
                    ", ".join(sorted({v.seen_in for v in values.values() if v.seen_in})) or GAP,
                    tone="source",
                ),
            ]
            for (init, source, runs), values in rows.items()
        ],
        detail=True,
    )


def _published_value(found: Published | None) -> Entry:
    if found is None:
        return Entry(GAP)
    if found.verified:
        return Entry(str(found.value), found.value)
    return Entry(f"{found.value} (unverified)", found.value, "unverified")


def _runs(results: dict[str, Any]) -> Section:
    """Every trial that should be there, with its first metric."""
    cells = {(c["task"], c["init"], c["trial"]): c for c in results["cells"]}
    rows = []
    for task in results["tasks"]:
        for init in inits_of(results, task):
            for trial in range(1, count_trials(results) + 1):
                cell = cells.get((task["name"], init["name"], trial))
                head = [Entry(task["name"]), Entry(init["name"]), Entry(str(trial), trial)]
                rows.append(head + _run_entries(cell, task["metric"]))
    columns = ["task", row_word(results["tasks"]), "trial", "seed", "state", "minutes", "result"]
    return Section("Runs", tables=[Table("Every run", columns, rows, detail=True)])


def _run_entries(cell: dict[str, Any] | None, metric: str) -> list[Entry]:
    if cell is None:
        return [Entry(GAP), Entry("missing", tone="missing"), Entry(GAP), Entry(GAP)]
    tone = "failed" if cell["status"] == FAILED else ""
    value = cell["metrics"].get(metric)
    return [
        Entry(str(cell["seed"]), cell["seed"]),
        Entry(cell["status"], tone=tone),
        Entry(f"{cell['seconds'] / 60:.1f}", cell["seconds"] / 60),
        Entry(GAP) if value is None else Entry(_number(value, None), value),
    ]


def _reading(results: dict[str, Any]) -> Section:
    sentences = ["± after a mean is the standard deviation of single trials (n − 1)."]
    if any(row[f"diff_{kind}"] for row in results["summary"] for kind in (RANDOM, SUPERVISED)):
        sentences.append(
            "± after a difference is its standard error. Trials of the same seed are compared with "
            "each other, where both initialisations have at least two of them."
        )
    if any(row["published"] for row in results["summary"]):
        sentences += [
            "A mean is within where it is at most 2 · √(std² / n + std_p² / n_p) + 0.05 from the "
            "published value: n trials here, n_p published ones, std_p the published spread of "
            "one run, or the one measured here where none was published. One trial gets no "
            "verdict.",
            "Unverified: the number was not read in the paper or a copy of it. MoCo v1: arXiv "
            "1911.05722v3.",
        ]
    return Section("How to read this", sentences)


def _row(results: dict[str, Any], task: str, init: str, metric: str) -> dict[str, Any] | None:
    rows = results["summary"]
    found = (r for r in rows if (r["task"], r["init"], r["metric"]) == (task, init, metric))
    return next(found, None)
