"""A report as one HTML file that asks nothing of the network: styles and plots are in it."""

from html import escape
from pathlib import Path

from moco_d2.transfer.report_content import Entry, Section, Table, last_line
from moco_d2.visualization.style import COLOURS

STYLES = Path(__file__).with_name("report.css")
_LONG = 36  # characters from which a field may take two lines


def to_html(
    title: str, facts: dict[str, str], sections: list[Section], plots: dict[str, str]
) -> str:
    """A page for light and dark screens of any width.

    Args:
        title: of the page.
        facts: name -> value, folded away below the title.
        sections: see `moco_d2.transfer.report_content.content`.
        plots: name of a section's plot -> SVG element.
    """
    links = "".join(
        f'<li><a href="#section-{i}">{escape(section.title)}</a></li>'
        for i, section in enumerate(sections)
    )
    definitions = "".join(
        f"<dt>{escape(name)}</dt><dd>{escape(value)}</dd>" for name, value in facts.items()
    )
    body = "\n".join(_section(section, f"section-{i}", plots) for i, section in enumerate(sections))
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{escape(title)}</title>
<link rel="icon" href="data:,">
<style>
{STYLES.read_text()}{_colours()}</style>
</head>
<body>
<header>
<h1>{escape(title)}</h1>
<details><summary>How this was run</summary><dl>{definitions}</dl></details>
<nav aria-label="Sections"><ul>{links}</ul></nav>
</header>
<main>
{body}
</main>
</body>
</html>
"""


def _section(section: Section, anchor: str, plots: dict[str, str]) -> str:
    parts = [f'<section aria-labelledby="{anchor}">']
    parts.append(f'<h2 id="{anchor}">{escape(section.title)}</h2>')
    parts += [f"<p>{escape(sentence)}</p>" for sentence in section.sentences]
    figures = [_figure(plots[name], seen) for name, seen in section.plots]
    if figures:
        parts.append(f'<div class="plots">{"".join(figures)}</div>')
    parts += [_table(table, section.title) for table in section.tables]
    parts += [_failure(*failure) for failure in section.failures]
    return "\n".join([*parts, "</section>"])


def _failure(runs: list[str], error: str) -> str:
    said, more = last_line(error), ""
    if said != error:
        more = f"<details><summary>More</summary><pre>{escape(error)}</pre></details>"
    names = ", ".join(f"<code>{escape(run)}</code>" for run in runs)
    return (
        '<div class="failure" role="note">'
        f'<p><strong class="failed">Failed:</strong> {names}</p><p>{escape(said)}</p>{more}</div>'
    )


def _figure(svg: str, seen: str) -> str:
    svg = svg.replace("<svg", f'<svg role="img" aria-label="{escape(seen)}"', 1)
    return f"<figure>{svg}<figcaption>{escape(seen)}</figcaption></figure>"


def _table(table: Table, section: str) -> str:
    numbers = [
        any(row[i].value is not None for row in table.rows) for i in range(len(table.columns))
    ]
    head = "".join(
        f'<th scope="col"{_class("number" * number)}>{escape(name)}</th>'
        for name, number in zip(table.columns, numbers, strict=True)
    )
    rows = "".join(
        "<tr>"
        + "".join(
            _entry(entry, number, i == 0)
            for i, (entry, number) in enumerate(zip(row, numbers, strict=True))
        )
        + "</tr>\n"
        for row in table.rows
    )
    label = escape(table.caption)
    html = (
        f'<div class="scroll" role="region" aria-label="{escape(section)}: {label}" tabindex="0">'
        f"<table>\n<thead><tr>{head}</tr></thead>\n<tbody>\n{rows}</tbody></table></div>"
    )
    if table.detail:
        return f"<details><summary>{label}</summary>{html}</details>"
    return f'<p class="caption">{label}</p>{html}'


def _entry(entry: Entry, number: bool, heads_row: bool) -> str:
    """A field; the unrounded number goes with the text."""
    text = escape(entry.text)
    if entry.value is not None:
        text = f'<data value="{entry.value!r}">{text}</data>'
    wide = "wide" * (len(entry.text) > _LONG)
    if heads_row:
        return f'<th scope="row"{_class(wide)}>{text}</th>'
    return f'<td{_class(" ".join(filter(None, ("number" * number, wide, entry.tone))))}>{text}</td>'


def _class(names: str) -> str:
    return f' class="{names}"' if names else ""


def _colours() -> str:
    """The plots' colours as CSS, for light and dark."""
    light, dark = (
        "".join(f"--series-{i}: {pair[k]}; " for i, pair in enumerate(COLOURS)) for k in (0, 1)
    )
    return f":root {{ {light}}}\n@media (prefers-color-scheme: dark) {{ :root {{ {dark}}} }}\n"
