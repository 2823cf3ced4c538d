"""Telling the formats of weight files apart, and a file's tensors: backbone, dropped, unknown."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor, nn

from moco_d2.checkpoint.files import WeightFile, WeightsError
from moco_d2.checkpoint.naming import NAMINGS, Naming, Renames, rename
from moco_d2.checkpoint.verify import shown
from moco_d2.checkpoint.vit import HeadsRule, heads_of_width


@dataclass(frozen=True)
class WeightFormat:
    """One format. Patterns are regular expressions; a whole name must match, but for prefixes.

    Attributes:
        title: what a user would call it.
        layout: where the layout is defined: a repository, and the class or function in it.
        signature: each of these matches some name in every file of this format.
        absent: none of these matches a name in a file of this format. Exactly one format has a
            given file's signature without having its absent names.
        encoders: for files with several encoders, what each one's names start with. One of the
            encoders is taken, the others are dropped.
        prefix: what the names of a backbone start with, inside the encoder.
        own_names: turn a backbone's names, without prefix, into those of `naming`.
        naming: whose names the backbone's tensors have then, a key of `NAMINGS`.
        dropped: pattern of names, inside the encoder -> why they are no part of a backbone.
        extras: pattern of a backbone's own names that its own library uses and detectron2 does not.
        heads: (channels) -> number of heads of a ViT, or None where no rule says it.
        convention: input convention, where the format fixes it, or what tells it by the
            architecture; None if the file must state it.
        frozen_norms: norms have a scale and a shift only: their statistics are part of these.
        network: (architecture, what a user says of the input convention) -> the source's own
            network, see `Naming.network`; None takes that of `naming`.
        detected: False for names that another format has, too: taken only when forced.
    """

    title: str
    layout: str
    signature: tuple[str, ...]
    absent: tuple[str, ...] = ()
    encoders: Mapping[str, str] = field(default_factory=dict)
    prefix: str = ""
    own_names: Renames = ()
    naming: str = "torchvision"
    dropped: Mapping[str, str] = field(default_factory=dict)
    extras: str | None = None
    heads: HeadsRule = heads_of_width
    convention: Mapping[str, Any] | Callable[[Mapping], Mapping[str, Any]] | None = None
    frozen_norms: bool = False
    network: Callable[[Mapping, Mapping], nn.Module] | None = None
    detected: bool = True

    @property
    def names(self) -> Naming:
        return NAMINGS[self.naming]

    def matches(self, state: Mapping[str, Tensor]) -> bool:
        """Whether a file with these tensors is of this format."""
        has = (any(re.fullmatch(p, name) for name in state) for p in self.signature)
        return all(has) and not any(re.fullmatch(p, name) for p in self.absent for name in state)


@dataclass(frozen=True)
class Parts:
    """A file's tensors, told apart.

    Attributes:
        prefix: what the names of the backbone start with in the file.
        backbone: tensors by the names of the format's `naming`.
        extras: tensors, by the same names, that detectron2 does not use.
        origin: name in `backbone` or `extras` -> name in the file.
        dropped: name in the file -> why it is no part of the backbone.
        unknown: names in the file that the format does not know.
    """

    prefix: str
    backbone: dict[str, Tensor]
    extras: dict[str, Tensor]
    origin: dict[str, str]
    dropped: dict[str, str]
    unknown: list[str]

    def in_file(self, name: str) -> str:
        """The name in the file of a tensor of the backbone, whether or not it is there."""
        return self.origin.get(name, self.prefix + name)


def detect_format(file: WeightFile, formats: Mapping[str, WeightFormat]) -> str:
    """Name the format of a file by the names of its tensors.

    Raises:
        WeightsError: no format has such names, or more than one does.
    """
    found = [n for n, entry in formats.items() if entry.detected and entry.matches(file.state)]
    if len(found) != 1:
        problem = f"could be any of {', '.join(found)}" if found else "are of no known format"
        raise WeightsError(
            f"the tensors of {file.name} {problem}: {shown(list(file.state))}; known: "
            f"{', '.join(formats)}; --list-formats describes them, --from NAME forces one"
        )
    return found[0]


def split_tensors(entry: WeightFormat, file: WeightFile, encoder: str) -> Parts:
    """Tell the backbone of one encoder apart from what is to be dropped and what is unknown.

    Args:
        entry: the file's format.
        file: whose tensors to split.
        encoder: "query" or "key"; a format without encoders knows only "query".

    Raises:
        WeightsError: the format has no such encoder, or the file no such tensor.
    """
    if encoder not in (entry.encoders or ("query",)):
        raise WeightsError(f"{entry.title} has no {encoder} encoder to export")
    own = re.compile(entry.encoders.get(encoder, ""))
    others = {prefix: f"{e} encoder" for e, prefix in entry.encoders.items() if e != encoder}
    parts = Parts("", {}, {}, {}, {}, [])
    prefix = ""
    for name, tensor in file.state.items():
        match = own.match(name)
        inner = name[match.end() :] if match else name
        other = next((why for p, why in others.items() if not match and re.match(p, name)), None)
        why = other or next((w for p, w in entry.dropped.items() if re.fullmatch(p, inner)), None)
        start = re.match(entry.prefix, inner) if match else None
        if why is not None:
            parts.dropped[name] = why
        elif start:
            bare = rename(inner[start.end() :], entry.own_names)
            extra = entry.extras is not None and re.fullmatch(entry.extras, bare)
            (parts.extras if extra else parts.backbone)[bare] = tensor
            parts.origin[bare] = name
            prefix = name.removesuffix(inner[start.end() :])
        else:
            parts.unknown.append(name)
    if not parts.backbone:
        raise WeightsError(
            f"{file.name} has no tensor of the {encoder} encoder's backbone in "
            f"{entry.title}: {shown(list(file.state))}"
        )
    return replace(parts, prefix=prefix)
