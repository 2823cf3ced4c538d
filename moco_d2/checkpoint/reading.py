"""Reading the backbone of a weight file of any known format, with every tensor accounted for."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from moco_d2.checkpoint.convention import CONFIG_KEYS, checked_convention, stated_convention
from moco_d2.checkpoint.files import CheckError, WeightFile, WeightsError, read_weight_file
from moco_d2.checkpoint.formats import Parts, WeightFormat, detect_format, split_tensors
from moco_d2.checkpoint.naming import NAMINGS, rename
from moco_d2.checkpoint.table import FORMATS
from moco_d2.checkpoint.verify import architecture_from, compare_tensors, is_counter, shown
from moco_d2.checkpoint.vit import is_vit, vit_architecture
from moco_d2.modeling.vit import ClassTokenViT, build_vit

# What a ViT with a class token has besides detectron2's.
CLASS_TOKEN = {"cls_token", "norm.weight", "norm.bias"}
# detectron2's frozen norms divide by sqrt(var + EPS); with this variance they divide by 1.
EPS = 1e-5


@dataclass(frozen=True)
class Backbone:
    """The backbone of a weight file.

    Attributes:
        file: what was read.
        format: key of `FORMATS`.
        encoder: "query" or "key", or None where the file has one encoder and does not say which.
        tensors: by detectron2's names, in the network's order.
        origin: name in `tensors` or `extras` -> name in the file.
        extras: tensors of the source's network that detectron2 does not use, by timm's names.
        dropped: name in the file -> why it is no part of the backbone.
        added: names in `tensors` that are not in the file, but follow from what is.
        expected: number of tensors that the network has.
        architecture: plain Python, see `verify.py`.
        convention: the input convention, see `convention.py`.
        source_network: the network that the weights come from, filled with them.
    """

    file: WeightFile
    format: str
    encoder: str | None
    tensors: dict[str, Tensor]
    origin: dict[str, str]
    extras: dict[str, Tensor]
    dropped: dict[str, str]
    added: list[str]
    expected: int
    architecture: dict[str, Any]
    convention: dict[str, Any]
    source_network: nn.Module


def read_backbone(
    path: str,
    *,
    source_format: str | None = None,
    encoder: str | None = None,
    convention: Mapping[str, Any] | None = None,
    num_heads: int | None = None,
    unsafe_pickle: bool = False,
) -> Backbone:
    """Read a weight file, and tell for each of its tensors what it is.

    Args:
        path: see `files.read_weight_file`.
        source_format: key of `FORMATS`; None detects it by the names of the tensors.
        encoder: "query" or "key", for files with several; None takes the one that the format's
            own project publishes.
        convention: what to take for the input convention, or some keys of it, in place of what
            the format or the file says.
        num_heads: of a ViT, in place of what the format's rule says.
        unsafe_pickle: see `files.read_weight_file`.

    Raises:
        WeightsError: the file or an argument cannot be used.
        CheckError: a tensor is missing, left over or of another shape.
    """
    if source_format is not None and source_format not in FORMATS:
        raise WeightsError(f"there is no format {source_format!r}; known: {', '.join(FORMATS)}")
    file = read_weight_file(path, unsafe_pickle=unsafe_pickle)
    name = source_format or detect_format(file, FORMATS)
    entry = FORMATS[name]
    if not entry.matches(file.state):
        raise WeightsError(
            f"{file.name} is not {entry.title}: it has no tensors of such names, but "
            f"{shown(list(file.state))}"
        )
    encoder = encoder or next(iter(entry.encoders), "query")
    parts = split_tensors(entry, file, encoder)
    to_detectron2 = {n: rename(n, entry.names.to_detectron2) for n in parts.backbone}
    renamed = {to_detectron2[n]: tensor for n, tensor in parts.backbone.items()}
    architecture = _architecture(file, renamed, entry, num_heads)
    known = entry.convention(architecture) if callable(entry.convention) else entry.convention
    of_file = stated_convention(file) or {}
    stated = dict(convention or {})
    convention = _convention(file, {**(known or {}), **of_file}, stated, is_vit(renamed))
    build = entry.network or entry.names.network
    as_stated = {**of_file, **stated} if known and not is_vit(renamed) else convention
    network = build(architecture, as_stated)

    needed = network.body.state_dict()
    added = _add_statistics_(parts.backbone, needed) if entry.frozen_norms else []
    _check_complete(file, entry, parts, needed, architecture, added)
    network.body.load_state_dict(parts.backbone)
    order = [n for n in needed if n in parts.backbone]
    names = {n: rename(n, entry.names.to_detectron2) for n in [*order, *parts.extras]}
    return Backbone(
        file=file,
        format=name,
        encoder=encoder if entry.encoders else None,
        tensors={names[n]: parts.backbone[n] for n in order},
        origin={names[n]: in_file for n, in_file in parts.origin.items()},
        extras={names[n]: tensor for n, tensor in parts.extras.items()},
        dropped=parts.dropped,
        added=[names[n] for n in added],
        expected=sum(n in parts.backbone or not is_counter(n) for n in needed),
        architecture=architecture,
        convention=convention,
        source_network=network,
    )


def load_backbone(path: str, **options: Any) -> nn.Module:
    """Build detectron2's backbone from a weight file of any known format.

    Args:
        path: a weight file.
        options: those of :func:`read_backbone`.

    Returns:
        a detectron2 `Backbone` in eval mode, on the CPU, which maps images (N, 3, H, W) to features
        by name. Its attribute `input_convention` says which images it expects. A ViT whose file has
        a class token is a `ClassTokenViT`.

    Raises:
        WeightsError, CheckError: as :func:`read_backbone`.
    """
    source = read_backbone(path, **options)
    if set(source.extras) >= CLASS_TOKEN:
        backbone = build_vit(source.architecture, ClassTokenViT)
        backbone.load_state_dict({**source.tensors, **source.extras})
    else:
        backbone = NAMINGS["detectron2"].network(source.architecture, source.convention).body
        backbone.load_state_dict(source.tensors)
    backbone.input_convention = source.convention
    return backbone.eval()


def _architecture(
    file: WeightFile, renamed: Mapping[str, Tensor], entry: WeightFormat, num_heads: int | None
) -> dict[str, Any]:
    """What the file states about its backbone, or what its tensors tell."""
    stated = file.section("recipe").get("backbone") or file.section("source").get("architecture")
    try:
        if not is_vit(renamed):
            return dict(stated or architecture_from(renamed))
        if stated and "num_heads" in stated:
            return {**stated, "num_heads": num_heads or stated["num_heads"]}
        return vit_architecture(renamed, num_heads, entry.heads)
    except WeightsError as error:
        raise CheckError(f"{file.name}: {error}") from error


def _convention(file: WeightFile, known: Mapping, stated: Mapping, vit: bool) -> dict[str, Any]:
    """What a user states, and for the rest what is known of the format or the file."""
    scales = {"pixel_mean", "pixel_std"}
    turned = "format" in known and stated.get("format", known["format"]) != known["format"]
    if turned and scales - set(stated):
        raise WeightsError(
            f"with the channel order {stated['format']}, state the mean and the std in that order, "
            "too: --pixel-mean and --pixel-std"
        )
    convention = {**known, **stated}
    if vit:  # nothing to tell, but files state all four keys
        convention.setdefault("stride_in_1x1", False)
    if missing := [key for key in CONFIG_KEYS if key not in convention]:
        raise WeightsError(
            f"{file.name} does not state its input convention ({', '.join(missing)}), and it is "
            "not guessed; convert the file that it was made from, or state it with --format, "
            "--pixel-mean, --pixel-std and --stride-in-1x1 yes|no"
        )
    return checked_convention(convention, file.name)


def _add_statistics_(tensors: dict[str, Tensor], needed: Mapping[str, Tensor]) -> list[str]:
    """Give norms that only scale and shift the statistics under which they do just that."""
    added = []
    for name, value in needed.items():
        if name not in tensors and name.endswith(("running_mean", "running_var")):
            ones = name.endswith("running_var")
            tensors[name] = value.new_full(value.shape, 1 - EPS if ones else 0.0)
            added.append(name)
    return added


def _check_complete(
    file: WeightFile,
    entry: WeightFormat,
    parts: Parts,
    needed: Mapping[str, Tensor],
    architecture: Mapping,
    added: list[str],
) -> None:
    """
    Raises:
        CheckError: a tensor is missing, left over or of another shape.
    """
    left_out = {*parts.dropped, *(parts.origin[n] for n in parts.extras)}
    given = {n: tensor for n, tensor in file.state.items() if n not in left_out}
    given |= {parts.in_file(n): parts.backbone[n] for n in added}
    mismatch = compare_tensors({parts.in_file(n): t for n, t in needed.items()}, given)
    if mismatch:
        kind = f"{entry.title} of depth {architecture.get('depth')}"
        raise CheckError(f"{file.name} is not {kind} - {mismatch}")
