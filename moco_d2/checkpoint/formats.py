"""Who names tensors how: one table entry for each format of weight files that can be read."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from moco_d2.checkpoint.convention import IMAGENET_RGB
from moco_d2.checkpoint.files import WeightFile, WeightsError
from moco_d2.checkpoint.verify import Detectron2Features, TorchvisionFeatures, shown


@dataclass(frozen=True)
class WeightFormat:
    """One format. Patterns are regular expressions that match a whole name.

    Attributes:
        title: what a user would call it.
        signature: matches names that files of this format have and no other format's have.
        encoders: for files with several encoders, what each one's names start with. One of the
            encoders is taken, the others are dropped.
        prefix: what the names of a backbone start with, inside the encoder.
        renames: (pattern, replacement), applied in order, turn a backbone's names, without
            prefix, into detectron2's (`stem.conv1.weight`, `res2.0.conv1.norm.weight`, ...).
        dropped: pattern of names, inside the encoder -> why they are no part of a backbone.
        convention: input convention, where the format fixes it; else the file must state it.
        network: (architecture, convention) -> a module whose `body` has the source's own names,
            and which maps uint8 images (N, 3, H, W), RGB, to features by stage.
    """

    title: str
    signature: str
    encoders: Mapping[str, str] = field(default_factory=dict)
    prefix: str = ""
    renames: tuple[tuple[str, str], ...] = ()
    dropped: Mapping[str, str] = field(default_factory=dict)
    convention: Mapping[str, Any] | None = None
    network: Callable[[Mapping, Mapping], nn.Module] = Detectron2Features

    def rename(self, name: str) -> str:
        """detectron2's name for a tensor of the backbone."""
        for pattern, replacement in self.renames:
            name = re.sub(pattern, replacement, name)
        return name


FORMATS: dict[str, WeightFormat] = {
    "moco_d2": WeightFormat(
        title="a pretraining checkpoint of this project's MoCo",
        signature=r"encoder_[qk]\.backbone\..+",
        encoders={"query": "encoder_q.", "key": "encoder_k."},
        prefix="backbone.",
        dropped={r"head\..+": "projection head", r"dictionary\..+": "dictionary of keys"},
    ),
    "torchvision": WeightFormat(
        title="a state dict of a torchvision ResNet",
        signature=r"layer[1-4]\.\d+\.conv1\.weight",
        renames=(
            (r"^(?=(conv|bn)1\.)", "stem."),
            (r"^layer1\.", "res2."),
            (r"^layer2\.", "res3."),
            (r"^layer3\.", "res4."),
            (r"^layer4\.", "res5."),
            (r"\.bn(\d)\.", r".conv\1.norm."),
            (r"\.downsample\.0\.", ".shortcut."),
            (r"\.downsample\.1\.", ".shortcut.norm."),
        ),
        dropped={r"fc\..+": "classifier"},
        convention=IMAGENET_RGB,
        network=TorchvisionFeatures,
    ),
    "detectron2": WeightFormat(
        title="a backbone file of detectron2",
        signature=r"res[2-5]\.\d+\.conv1\.weight",
        dropped={r"stem\.fc\..+": "classifier or head that other converters keep as stem.fc"},
    ),
}


@dataclass(frozen=True)
class Parts:
    """A file's tensors, told apart. `backbone` has the names of the source's own network, which
    are the names in the file without `prefix`."""

    prefix: str
    backbone: dict[str, Tensor]
    dropped: dict[str, str]
    unknown: list[str]


def detect_format(file: WeightFile) -> str:
    """Name the format of a file by the names of its tensors.

    Raises:
        WeightsError: no format has such names, or more than one does.
    """
    found = [
        name
        for name, entry in FORMATS.items()
        if any(re.fullmatch(entry.signature, tensor) for tensor in file.state)
    ]
    if len(found) != 1:
        known = ", ".join(f"{name} ({entry.title})" for name, entry in FORMATS.items())
        problem = f"could be any of {', '.join(found)}" if found else "are of no known format"
        raise WeightsError(
            f"the tensors of {file.name} {problem}: {shown(list(file.state))}; known: {known}"
        )
    return found[0]


def split_tensors(name: str, state: Mapping[str, Tensor], encoder: str) -> Parts:
    """Tell the backbone of one encoder apart from what is to be dropped and what is unknown.

    Args:
        name: of the format.
        state: all tensors of the file.
        encoder: "query" or "key"; a format without encoders knows only "query".

    Raises:
        WeightsError: the format has no such encoder.
    """
    entry = FORMATS[name]
    if encoder not in (entry.encoders or ("query",)):
        raise WeightsError(f"{entry.title} has no {encoder} encoder to export")
    own = entry.encoders.get(encoder, "")
    others = {prefix: f"{e} encoder" for e, prefix in entry.encoders.items() if e != encoder}
    parts = Parts(own + entry.prefix, {}, {}, [])
    for tensor_name, tensor in state.items():
        inner = tensor_name.removeprefix(own)
        other = next((why for p, why in others.items() if tensor_name.startswith(p)), None)
        why = other or next((w for p, w in entry.dropped.items() if re.fullmatch(p, inner)), None)
        if why is not None:
            parts.dropped[tensor_name] = why
        elif tensor_name.startswith(parts.prefix):
            parts.backbone[tensor_name.removeprefix(parts.prefix)] = tensor
        else:
            parts.unknown.append(tensor_name)
    return parts
