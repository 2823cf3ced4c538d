"""Recorded results: every number in a table of README and docs/results is in a results.json."""

import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
RECORDED = sorted((ROOT / "docs/results").glob("*/results.json"))
RESULTS = {path.parent.name: json.loads(path.read_text()) for path in RECORDED}


def _tables(text: str) -> str:
    return "\n".join(line for line in text.splitlines() if line.startswith("|"))


# What is checked against which results.
README = (ROOT / "README.md").read_text().partition("\n## Results\n")[2].partition("\n## ")[0]
PAGES = {
    "README": (README, list(RESULTS.values())),
    "docs/results": ((ROOT / "docs/results/README.md").read_text(), list(RESULTS.values())),
    **{
        path.parent.name: (_tables(path.read_text()), [RESULTS[path.parent.name]])
        for path in sorted((ROOT / "docs/results").glob("*/report.md"))
    },
}
# No part of a name or of a version.
NUMBER = re.compile(r"(?<![\w./-])\d+(?:\.\d+)?(?![\w/-]|\.\d)")
BLOCK = re.compile(r"```.*?```", re.DOTALL)
CODE = re.compile(r"`[^`]*`")
SOURCE = re.compile(r"arXiv:?\s[\d.]+(?:v\d)?|Sec(?:tion|\.)\s[\d.]+")


def numbers(node) -> list[float]:
    """All numbers below a node of a JSON file; of seconds the minutes, too."""
    if isinstance(node, dict):
        minutes = [node["seconds"] / 60] if isinstance(node.get("seconds"), float) else []
        return minutes + [number for value in node.values() for number in numbers(value)]
    if isinstance(node, list):
        return [number for value in node for number in numbers(value)]
    return [node] if isinstance(node, int | float) and not isinstance(node, bool) else []


def records(node) -> list[dict]:
    """All that is said of one initialisation or variant."""
    if isinstance(node, dict):
        return [node] if "init" in node else [r for value in node.values() for r in records(value)]
    return [r for value in node for r in records(value)] if isinstance(node, list) else []


def unfounded(text: str, results: list[dict]) -> list[str]:
    """Numbers of a page's tables, and decimals of its sentences, that no result rounds to.

    In a row that names an initialisation, only what was measured of it counts.
    """
    known = records(results)
    found = []
    for line in SOURCE.sub("", BLOCK.sub("", text)).splitlines():
        line = line.replace("`", "") if line.startswith("|") else CODE.sub("", line)
        fields = [field.strip() for field in line.split("|")]
        own = [record for record in known if record["init"] in fields]
        values = numbers(own or results)
        words = [field for field in fields if not any(r["init"] == field for r in own)]
        for number in NUMBER.findall(" | ".join(words)):
            decimals = len(number.partition(".")[2])
            counts = own or decimals
            if counts and not any(f"{abs(value):.{decimals}f}" == number for value in values):
                found.append(f"{number} in: {line}")
    return found


@pytest.mark.parametrize("page", PAGES)
def test_every_number_was_recorded(page):
    assert unfounded(*PAGES[page]) == []


@pytest.mark.parametrize("path", RECORDED, ids=lambda path: path.parent.name)
def test_a_record_is_whole_and_says_how_but_not_where_it_was_run(path):
    text = path.read_text()
    results = json.loads(text)
    assert records(results) and results["command"] and results["date"]
    assert re.findall(r'(?<![\w.])/(?:home|root|tmp|work|mnt|Users)/[^\s"]*', text) == []


def test_a_wrong_number_is_noticed():
    results = [{"rows": [{"init": "a", "AP": 9.341, "n": 3}, {"init": "b", "AP": -5.5}]}]
    right = (
        "| a | 9.34 | 3 |\n| b | −5.5 |\nBy AP50, arXiv 1911.05722, Section 4.1: 9.3, torch 2.3.1."
    )
    assert unfounded(right, results) == []
    assert unfounded("| a | 9.35 | 3 |", results) == ["9.35 in: | a | 9.35 | 3 |"]
    assert unfounded("| a | 5.5 |", results) == ["5.5 in: | a | 5.5 |"]  # another row's
    assert unfounded("| a | 9.34 | 4 |", results) and unfounded("some 9.4 points", results)
    assert {n for line in unfounded("| b | 5.5 ± 0.7 |", results) for n in [line[:3]]} == {"0.7"}
