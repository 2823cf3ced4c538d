"""A report as Markdown, and its numbers as CSV."""

import csv
import io
from typing import Any

from moco_d2.transfer.report_content import Section, Table, last_line
from moco_d2.transfer.summary import count_trials


def to_markdown(title: str, facts: dict[str, str], sections: list[Section]) -> str:
    """GitHub's Markdown, with the plots as files beside it.

    Args:
        title: of the page.
        facts: name -> value, listed below the title.
        sections: see `moco_d2.transfer.report_content.content`.
    """
    blocks = [f"# {title}", "\n".join(f"- {name}: {value}" for name, value in facts.items())]
    for section in sections:
        blocks.append(f"## {section.title}")
        blocks += section.sentences
        blocks += [f"![{seen}](plots/{name}.png)" for name, seen in section.plots]
        blocks += [_table(table) for table in section.tables]
        blocks += [_failure(*failure) for failure in section.failures]
    return "\n\n".join(block for block in blocks if block) + "\n"


def to_csv(results: dict[str, Any]) -> str:
    """One row for each row of `summary`, unrounded; empty fields where there is no value."""
    trials = range(1, count_trials(results) + 1)
    columns = ["task", "init", "metric", "n", "mean", "std"]
    columns += ["diff_random", "diff_random_se", "diff_supervised", "diff_supervised_se"]
    columns += ["published", "published_source", "published_verified", "verdict"]
    columns += [f"trial_{trial}" for trial in trials]
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(columns)
    for row in results["summary"]:
        random, supervised = (row[f"diff_{kind}"] or {} for kind in ("random", "supervised"))
        published = row["published"] or {}
        values = dict(zip(row["trials"], row["values"], strict=True))
        fields = [row[key] for key in columns[:6]]
        fields += [random.get("mean"), random.get("se")]
        fields += [supervised.get("mean"), supervised.get("se")]
        fields += [published.get(key) for key in ("value", "source", "verified", "verdict")]
        writer.writerow(fields + [values.get(trial) for trial in trials])
    return text.getvalue()


def _table(table: Table) -> str:
    numbers = [
        all(row[i].value is not None for row in table.rows) for i in range(len(table.columns))
    ]
    lines = [table.columns, ["---:" if number else "---" for number in numbers]]
    lines += [[_escaped(entry.text) for entry in row] for row in table.rows]
    body = "\n".join("| " + " | ".join(line) + " |" for line in lines)
    return f"**{table.caption}**\n\n{body}"


def _escaped(text: str) -> str:
    return text.replace("|", r"\|")


def _failure(runs: list[str], error: str) -> str:
    return f"Failed: {', '.join(f'`{run}`' for run in runs)}: {last_line(error)}"
