"""Loading weights into a model: all of its backbone, or all of the model, or an error."""

import re
from collections import Counter
from dataclasses import dataclass
from typing import Any

from torch import nn

from moco_d2.checkpoint.convention import stated_convention
from moco_d2.checkpoint.files import CheckError, WeightFile, WeightsError, read_weight_file
from moco_d2.checkpoint.formats import detect_format, split_tensors
from moco_d2.checkpoint.reading import Backbone, read_backbone
from moco_d2.checkpoint.table import FORMATS
from moco_d2.checkpoint.verify import compare_tensors, is_counter, shown
from moco_d2.engine.distributed import unwrap

# Where detectors keep a ResNet or a ViT: what comes before its names, the first that a detector
# has. A C4 detector keeps its last stage, without the extra norm, in the RoI heads.
BODIES = (r"backbone\.bottom_up\.", r"backbone\.net\.", r"backbone\.")
ENCODER = r"encoder_[qk]\.backbone\."
CLASSIFIER = r"encoder\.backbone\."  # of ImageClassifier
RES5_IN_ROI_HEADS = r"roi_heads\.(?=res5\.\d)"
# What a detector's ViT has more than a pretrained one: relative positions, which begin at zero,
# and convolutional blocks, which begin as the identity.
NEW_IN_DETECTORS = r"blocks\.\d+\.(attn\.rel_pos_[hw]|residual\..+)"
FORMATS_TO_LOAD = ("detectron2", "detectron2_vit")
# Buffers that detectors of earlier releases saved, and that the config decides now.
NOT_WEIGHTS = r"pixel_(mean|std)|.*\.cell_anchors\..+"


@dataclass(frozen=True)
class LoadReport:
    """What was loaded from where.

    Attributes:
        file: name of the file.
        loaded: number of tensors of the model that were filled.
        new: names of the tensors of the model that keep their random initialisation.
        whole: whether the file held the whole model.
    """

    file: str
    loaded: int
    new: list[str]
    whole: bool

    def __str__(self) -> str:
        if self.whole:
            return f"Loaded all {self.loaded} tensors of the model from {self.file}."
        parts = Counter(".".join(name.split(".")[:2]) for name in self.new)
        new = ", ".join(f"{part} ({count})" for part, count in parts.items())
        return (
            f"Loaded all {self.loaded} backbone tensors from {self.file}. "
            f"New, and initialised at random: {new or 'nothing'}."
        )


def read_detector_weights(path: str) -> WeightFile:
    """Read a file that :func:`load_detector_weights_` can load: a detector, or a backbone in
    detectron2's format.

    Raises:
        WeightsError: the file cannot be read, or is of another kind.
    """
    file = read_weight_file(path)
    if not _is_detector(file):
        _check_is_backbone(file)
    return file


def _is_detector(file: WeightFile) -> bool:
    # Other projects put their networks under `backbone`, too.
    known = any(entry.detected and entry.matches(file.state) for entry in FORMATS.values())
    return not known and any(name.startswith("backbone.") for name in file.state)


def _check_is_backbone(file: WeightFile) -> str:
    """The format, one of `FORMATS_TO_LOAD`."""
    name = detect_format(file, FORMATS)
    if name not in FORMATS_TO_LOAD:
        raise WeightsError(
            f"{file.name} is {FORMATS[name].title}; turn it into a detectron2 backbone first: "
            f"tools/convert_weights.py {file.path} OUT.pkl"
        )
    return name


def load_detector_weights_(model: nn.Module, path: str, *, whole: bool = False) -> LoadReport:
    """Fill a detector's backbone, or the whole detector, from a file.

    A file of a backbone must fill every tensor of the model's backbone and have none left over;
    a file of a detector must do so for the whole model. Nothing is loaded otherwise.

    Args:
        model: a detector with `backbone`, in DDP or not.
        path: what `tools/convert_weights.py` or another converter of detectron2 backbones wrote,
            or a checkpoint of a detector.
        whole: accept a whole detector only, since the model is not going to be trained.

    Raises:
        WeightsError: the file cannot be read, or is of another kind.
        CheckError: a tensor is missing, left over or of another shape.
    """
    model = unwrap(model)
    file = read_detector_weights(path)
    if _is_detector(file):
        return _load_whole_(model, file)
    if whole:
        raise WeightsError(
            f"{file.name} holds a backbone only; to evaluate, MODEL.WEIGHTS must name the "
            "checkpoint of a trained detector"
        )
    names = list(model.state_dict())
    body = next((b for b in BODIES if any(re.match(b, n) for n in names)), None)
    if body is None:
        raise WeightsError(f"the model has no backbone to load into: {shown(names)}")
    return _load_backbone_(model, file, f"{body}|{RES5_IN_ROI_HEADS}")


def load_pretraining_weights_(model: nn.Module, path: str) -> LoadReport:
    """Fill all of a MoCo model from a checkpoint of one, or both encoders' backbones from a file
    of any known format.

    Args:
        model: with `encoder_q` and `encoder_k`, in DDP or not.
        path: a pretraining checkpoint, or what :func:`read_backbone` reads. A ViT with a class
            token needs a file that has one.

    Raises:
        WeightsError: the file cannot be read, or is of another kind.
        CheckError: a tensor is missing, left over or of another shape.
    """
    model = unwrap(model)
    file = read_weight_file(path)
    name = detect_format(file, FORMATS)
    if name == "moco_d2":
        return _load_whole_(model, file)
    if name in FORMATS_TO_LOAD:
        return _load_backbone_(model, file, ENCODER)
    return _fill_backbones_(model, read_backbone(path), ENCODER)


def convention_of_weights(path: str) -> dict[str, Any] | None:
    """The input convention of what :func:`load_pretraining_weights_` loads; None: not known.

    Raises:
        WeightsError: the file cannot be read, or is of no known format.
    """
    file = read_weight_file(path)
    stated = stated_convention(file)
    if stated is None and detect_format(file, FORMATS) not in FORMATS_TO_LOAD:
        return read_backbone(path).convention
    return stated


def load_classifier_weights_(model: nn.Module, path: str, *, whole: bool = False) -> LoadReport:
    """Fill an ImageClassifier's backbone from a file of any known format, or all of it.

    Args:
        model: with `encoder.backbone`, in DDP or not.
        path: what :func:`read_backbone` reads; of a classifier's checkpoint, its backbone.
        whole: accept a whole classifier only, since the model is not going to be trained.

    Raises:
        WeightsError: the file cannot be read, or is of another kind.
        CheckError: a tensor is missing, left over or of another shape.
    """
    model = unwrap(model)
    if whole:
        file = read_weight_file(path)
        if detect_format(file, FORMATS) != "moco_d2_classifier":
            raise WeightsError(
                f"{file.name} holds a backbone only; to evaluate, MODEL.WEIGHTS must name the "
                "checkpoint of a trained ImageClassifier"
            )
        return _load_whole_(model, file)
    return _fill_backbones_(model, read_backbone(path), CLASSIFIER)


def _fill_backbones_(model: nn.Module, source: Backbone, place: str) -> LoadReport:
    """
    Args:
        place: pattern of what comes before a backbone's names in the model.
    """
    _check_heads(model, source.file.name, source.architecture.get("num_heads"))
    state = model.state_dict()
    names = {n: re.sub(place, "", n, count=1) for n in state if re.match(place, n)}
    needed = {name: state[n] for n, name in names.items()}
    # The class token and the last norm, where the model has them, too.
    extras = {n: tensor for n, tensor in source.extras.items() if n in needed}
    given = {**source.tensors, **extras}
    mismatch = compare_tensors(needed, given)
    if mismatch:
        raise CheckError(f"{source.file.name} does not fit the backbone of this model - {mismatch}")
    filled = {n: given[name] for n, name in names.items() if name in given}
    model.load_state_dict(filled, strict=False)
    new = [n for n in state if n not in filled and not is_counter(n)]
    return LoadReport(source.file.name, len(filled), new, whole=False)


def _load_whole_(model: nn.Module, file: WeightFile) -> LoadReport:
    needed = model.state_dict()
    given = {n: t for n, t in file.state.items() if not re.fullmatch(NOT_WEIGHTS, n)}
    mismatch = compare_tensors(needed, given)
    if mismatch:
        raise CheckError(f"{file.name} is not of this model - {mismatch}")
    filled = {name: tensor for name, tensor in given.items() if name in needed}
    model.load_state_dict(filled, strict=False)
    return LoadReport(file.name, len(filled), [], whole=True)


def _load_backbone_(model: nn.Module, file: WeightFile, place: str) -> LoadReport:
    """
    Args:
        place: pattern of what comes before detectron2's names of a ResNet's tensors in the model.
    """
    entry = FORMATS[_check_is_backbone(file)]
    backbone = split_tensors(entry, file, "query").backbone
    _check_heads(model, file.name, file.section("source").get("architecture", {}).get("num_heads"))
    state = model.state_dict()
    sources = {n: re.sub(place, "", n, count=1) for n in state if re.match(place, n)}
    needed = {
        source: state[n]
        for n, source in sources.items()
        if source in backbone or not re.fullmatch(NEW_IN_DETECTORS, source)
    }
    mismatch = compare_tensors(needed, backbone)
    if mismatch:
        raise CheckError(f"{file.name} does not fit the backbone of this model - {mismatch}")
    filled = {n: backbone[source] for n, source in sources.items() if source in backbone}
    model.load_state_dict(filled, strict=False)
    new = [n for n in state if n not in filled and not is_counter(n)]
    return LoadReport(file.name, len(filled), new, whole=False)


def _check_heads(model: nn.Module, file: str, stated: int | None) -> None:
    """
    Args:
        stated: number of heads that the file says or that follows from its format, if any.

    Raises:
        CheckError: the model's ViT splits its channels over other heads than the file's, which no
            tensor shows.
    """
    for name, module in model.named_modules():
        heads = getattr(module, "num_heads", None)
        if stated and name.endswith("blocks.0.attn") and heads != stated:
            raise CheckError(
                f"{file} is of a ViT with {stated} heads, and this model's has {heads}: its "
                "features would be others"
            )
