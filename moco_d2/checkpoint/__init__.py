"""Weight files: who names tensors how, conversion, verification, and loading that is complete."""

from moco_d2.checkpoint.convention import (
    apply_input_convention,
    convention_of,
    read_input_convention,
)
from moco_d2.checkpoint.conversion import ConversionReport, convert
from moco_d2.checkpoint.files import CheckError, WeightsError
from moco_d2.checkpoint.loading import (
    LoadReport,
    load_classifier_weights_,
    load_detector_weights_,
    load_pretraining_weights_,
)
from moco_d2.checkpoint.naming import targets
from moco_d2.checkpoint.reading import load_backbone, read_backbone
from moco_d2.checkpoint.table import format_rows

__all__ = [
    "CheckError",
    "ConversionReport",
    "LoadReport",
    "WeightsError",
    "apply_input_convention",
    "convention_of",
    "convert",
    "format_rows",
    "load_backbone",
    "load_classifier_weights_",
    "load_detector_weights_",
    "load_pretraining_weights_",
    "read_backbone",
    "read_input_convention",
    "targets",
]
