"""Loading weights into a detector: all of the backbone, or all of the detector, or an error."""

import re
from collections import Counter
from dataclasses import dataclass

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from moco_d2.checkpoint.files import CheckError, WeightFile, WeightsError, read_weight_file
from moco_d2.checkpoint.formats import FORMATS, detect_format, split_tensors
from moco_d2.checkpoint.verify import compare_tensors, is_counter, shown

# Where detectors keep a ResNet: what comes before its names, the first that a detector has. A C4
# detector keeps its last stage, without the extra norm, in the RoI heads.
BODIES = (r"backbone\.bottom_up\.", r"backbone\.")
RES5_IN_ROI_HEADS = r"roi_heads\.(?=res5\.\d)"
# Buffers that detectors of earlier releases saved, and that the config decides now.
NOT_WEIGHTS = r"pixel_(mean|std)|.*\.cell_anchors\..+"


@dataclass(frozen=True)
class LoadReport:
    """What was loaded from where.

    Attributes:
        file: name of the file.
        loaded: number of tensors of the model that were filled.
        new: names of the tensors of the model that keep their random initialisation.
        whole: whether the file held the whole detector.
    """

    file: str
    loaded: int
    new: list[str]
    whole: bool

    def __str__(self) -> str:
        if self.whole:
            return f"Loaded all {self.loaded} tensors of the detector from {self.file}."
        parts = Counter(".".join(name.split(".")[:2]) for name in self.new)
        new = ", ".join(f"{part} ({count})" for part, count in parts.items())
        return (
            f"Loaded all {self.loaded} backbone tensors from {self.file}. "
            f"New, and initialised at random: {new or 'nothing'}."
        )


def load_weights(model: nn.Module, path: str, *, whole: bool = False) -> LoadReport:
    """Fill a detector's backbone, or the whole detector, from a file, in place.

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
    if isinstance(model, DistributedDataParallel):
        model = model.module
    file = read_weight_file(path)
    if any(name.startswith("backbone.") for name in file.state):
        return _load_detector(model, file)
    if whole:
        raise WeightsError(
            f"{file.name} holds a backbone only; to evaluate, MODEL.WEIGHTS must name the "
            "checkpoint of a trained detector"
        )
    return _load_backbone(model, file)


def _load_detector(model: nn.Module, file: WeightFile) -> LoadReport:
    needed = model.state_dict()
    given = {n: t for n, t in file.state.items() if not re.fullmatch(NOT_WEIGHTS, n)}
    mismatch = compare_tensors(needed, given)
    if mismatch:
        raise CheckError(f"{file.name} is not of this detector - {mismatch}")
    filled = {name: tensor for name, tensor in given.items() if name in needed}
    model.load_state_dict(filled, strict=False)
    return LoadReport(file.name, len(filled), [], whole=True)


def _load_backbone(model: nn.Module, file: WeightFile) -> LoadReport:
    name = detect_format(file)
    if name != "detectron2":
        raise WeightsError(
            f"{file.name} is {FORMATS[name].title}; turn it into a detectron2 backbone first: "
            f"tools/convert_weights.py {file.path} OUT.pkl"
        )
    parts = split_tensors(name, file.state, "query")
    state = model.state_dict()
    places = backbone_places(list(state))
    mismatch = compare_tensors({n: state[place] for n, place in places.items()}, parts.backbone)
    if mismatch:
        raise CheckError(f"{file.name} does not fit the backbone of this model - {mismatch}")
    filled = {places[n]: tensor for n, tensor in parts.backbone.items() if n in places}
    model.load_state_dict(filled, strict=False)
    new = [n for n in state if n not in filled and not is_counter(n)]
    return LoadReport(file.name, len(filled), new, whole=False)


def backbone_places(names: list[str]) -> dict[str, str]:
    """Find the ResNet inside a detector.

    Args:
        names: of all tensors of the detector.

    Returns:
        detectron2's name for each tensor of the ResNet -> its name in the detector.

    Raises:
        WeightsError: the detector has no backbone.
    """
    body = next((b for b in BODIES if any(re.match(b, n) for n in names)), None)
    if body is None:
        raise WeightsError(f"the model has no backbone to load into: {shown(names)}")
    place = re.compile(f"{body}|{RES5_IN_ROI_HEADS}")
    return {place.sub("", n, count=1): n for n in names if place.match(n)}
