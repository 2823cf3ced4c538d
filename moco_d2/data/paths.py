"""Names that stand for several paths: ranges and alternatives in braces, and globs."""

import glob
import itertools
import os
import re

_RANGE = re.compile(r"(\d+)\.\.(\d+)")
_BRACES = re.compile(r"\{([^{}]*(?:,|\.\.)[^{}]*)\}")


def expand_paths(pattern: str) -> list[str]:
    """Expand ``{000..127}`` and ``{a,b}`` in their order, then ``*``, ``?``, ``[...]`` and ``**``
    among files that exist, sorted. What exists under the pattern's own name is that alone."""
    if os.path.exists(pattern):
        return [pattern]
    return list(itertools.chain.from_iterable(map(_expand_glob, expand_braces(pattern))))


def expand_braces(pattern: str) -> list[str]:
    """Expand all braces of a pattern. Numbers keep the width of the range's first."""
    found = _BRACES.search(pattern)
    if found is None:
        return [pattern]
    numbers = _RANGE.fullmatch(found[1])
    if numbers:
        first, last = numbers.groups()
        choices = [str(n).zfill(len(first)) for n in range(int(first), int(last) + 1)]
    else:
        choices = found[1].split(",")
    before, after = pattern[: found.start()], pattern[found.end() :]
    return [path for choice in choices for path in expand_braces(before + choice + after)]


def _expand_glob(pattern: str) -> list[str]:
    if "://" in pattern or os.path.exists(pattern) or not glob.has_magic(pattern):
        return [pattern]
    return sorted(glob.glob(pattern, recursive=True))
