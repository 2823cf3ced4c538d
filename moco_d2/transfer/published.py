"""Published transfer results: published.yaml, read and checked."""

from dataclasses import dataclass
from functools import cache
from pathlib import Path

import yaml

PATH = Path(__file__).with_name("published.yaml")


@dataclass(frozen=True)
class Published:
    """One published value of one metric.

    `std` is the standard deviation of a single run, None where no source states it; `value` is
    the mean of `runs` runs. `seen_in` names the text in which the value was read, None: unverified.
    """

    init: str
    metric: str
    value: float
    std: float | None
    runs: int
    source: str
    seen_in: str | None

    @property
    def verified(self) -> bool:
        return self.seen_in is not None


@dataclass(frozen=True)
class PublishedTask:
    """A task's protocol and values, in the order of the file."""

    name: str
    protocol: str
    not_comparable: str | None
    values: tuple[Published, ...]

    def find(self, init: str, metric: str) -> Published | None:
        """The value that an initialisation's authors gave: the first one."""
        found = (v for v in self.values if (v.init, v.metric) == (init, metric))
        return next(found, None)


@dataclass(frozen=True)
class PublishedResults:
    inits: dict[str, str]  # name -> what it is, in words
    tasks: dict[str, PublishedTask]


@cache
def published_results() -> PublishedResults:
    """The results that come with this package."""
    return parse(yaml.safe_load(PATH.read_text()))


def parse(content: dict) -> PublishedResults:
    """Turn the content of the file into values.

    Args:
        content: `inits`, `sources` and `tasks`, described at the top of published.yaml.

    Raises:
        ValueError: a row has an unknown or missing key, names an unknown initialisation or source,
            or has a value outside 0 to 100.
    """
    tasks = {}
    for name, task in content["tasks"].items():
        _check_keys(name, task, {"protocol", "rows"}, {"not_comparable", "std"})
        values = [value for row in task["rows"] for value in _values(name, row, task, content)]
        tasks[name] = PublishedTask(
            name, task["protocol"], task.get("not_comparable"), tuple(values)
        )
    return PublishedResults(content["inits"], tasks)


def _values(name: str, row: dict, task: dict, content: dict) -> list[Published]:
    _check_keys(name, row, {"init", "metrics", "source"}, {"runs", "seen_in"})
    for key, known in (("init", "inits"), ("source", "sources"), ("seen_in", "sources")):
        if key in row and row[key] not in content[known]:
            raise ValueError(f"{name}: {key} {row[key]!r} is not among {known}")
    sources, std = content["sources"], task.get("std", {})
    values = []
    for metric, value in row["metrics"].items():
        if not 0 <= value <= 100:
            raise ValueError(f"{name}: {metric} of {row['init']} is {value}, outside 0 to 100")
        values.append(
            Published(
                row["init"],
                metric,
                float(value),
                std.get(metric),
                row.get("runs", 1),
                sources[row["source"]],
                sources[row["seen_in"]] if "seen_in" in row else None,
            )
        )
    return values


def _check_keys(name: str, entry: dict, needed: set[str], optional: set[str]) -> None:
    wrong = (needed - entry.keys()) | (entry.keys() - needed - optional)
    if wrong:
        raise ValueError(f"{name}: unknown or missing {', '.join(sorted(wrong))}")
