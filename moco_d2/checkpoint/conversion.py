"""Read a weight file, write a backbone that detectron2 loads, and prove what was written."""

import os
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from moco_d2.checkpoint.convention import stated_convention
from moco_d2.checkpoint.files import (
    CheckError,
    WeightFile,
    WeightsError,
    read_weight_file,
    replaced_file,
    write_weight_file,
)
from moco_d2.checkpoint.formats import FORMATS, detect_format, split_tensors
from moco_d2.checkpoint.verify import (
    Detectron2Features,
    architecture_from,
    compare_tensors,
    is_counter,
    largest_difference,
)

AUTHOR = "moco_d2"
SUFFIXES = (".pkl", ".pth")
TOLERANCE = 1e-5


@dataclass(frozen=True)
class ConversionReport:
    """What a conversion did.

    Attributes:
        output: path of the written file.
        exported: number of backbone tensors written.
        expected: number of tensors that the backbone has.
        dropped: name of a tensor that was left out -> why.
        difference: largest difference of the features between source and written file.
        input: the input convention that was written.
        source: provenance that was written.
    """

    output: str
    exported: int
    expected: int
    dropped: dict[str, str]
    difference: float
    input: dict[str, Any]
    source: dict[str, Any]

    def __str__(self) -> str:
        reasons = Counter(self.dropped.values())
        details = ", ".join(f"{count} {why}" for why, count in reasons.items())
        architecture = self.source["architecture"]
        return "\n".join(
            [
                f"{self.source['file']}: {FORMATS[self.source['format']].title}"
                + (f", {self.source['encoder']} encoder" if self.source["encoder"] else "")
                + f", ResNet-{architecture['depth']} to {architecture['out_features'][-1]}",
                f"{self.exported} of {self.expected} backbone tensors exported, "
                f"{len(self.dropped)} dropped" + (f": {details}" if details else ""),
                "input: " + ", ".join(f"{key} {value}" for key, value in self.input.items()),
                "largest difference to the features of the source: "
                f"{self.difference:.1e} (at most {TOLERANCE:.0e})",
                f"wrote {self.output}",
            ]
        )


def convert(
    source: str, output: str, *, encoder: str = "query", force: bool = False
) -> ConversionReport:
    """Write the backbone of a weight file in detectron2's format, and check what was written.

    The output appears at its place only after all checks have passed.

    Args:
        source: a file of one of the formats in `formats.FORMATS`.
        output: `.pkl` (NumPy arrays) or `.pth` (tensors).
        encoder: "query" or "key", for files with several.
        force: replace an existing output.

    Raises:
        WeightsError: the source or the output cannot be used.
        CheckError: a tensor is missing, left over or of another shape, or the written backbone
            gives other features than the source's.
    """
    _check_output(source, output, force)
    file = read_weight_file(source)
    name = detect_format(file)
    entry = FORMATS[name]
    parts = split_tensors(name, file.state, encoder)
    renamed = {entry.rename(n): tensor for n, tensor in parts.backbone.items()}
    architecture = _architecture(file, renamed)
    convention = dict(entry.convention or stated_convention(file) or _no_convention(file))

    reference = entry.network(architecture, convention)
    needed = reference.body.state_dict()
    mismatch = compare_tensors(
        {parts.prefix + n: tensor for n, tensor in needed.items()},
        {n: tensor for n, tensor in file.state.items() if n not in parts.dropped},
    )
    if mismatch:
        raise CheckError(
            f"{file.name} is not {entry.title} of depth {architecture['depth']} - {mismatch}"
        )
    reference.body.load_state_dict(parts.backbone)

    content = {
        "model": {entry.rename(n): parts.backbone[n] for n in needed if n in parts.backbone},
        "__author__": AUTHOR,
        "matching_heuristics": True,
        "input": convention,
        "source": _provenance(file, name, encoder, architecture),
    }
    with replaced_file(output) as aside:
        write_weight_file(aside, content)
        difference = _check_features(reference, aside)
    return ConversionReport(
        output=output,
        exported=len(content["model"]),
        expected=sum(n in parts.backbone or not is_counter(n) for n in needed),
        dropped=parts.dropped,
        difference=difference,
        input=convention,
        source=content["source"],
    )


def _check_output(source: str, output: str, force: bool) -> None:
    folder = os.path.dirname(os.path.abspath(output))
    if not output.endswith(SUFFIXES):
        raise WeightsError(f"the output {output} must end in {' or '.join(SUFFIXES)}")
    if not os.path.isdir(folder):
        raise WeightsError(f"the folder of the output {output} does not exist")
    if os.path.exists(output):
        if os.path.exists(source) and os.path.samefile(source, output):
            raise WeightsError(f"the output {output} is the source itself; name another file")
        if not force:
            raise WeightsError(f"{output} exists; name another file, or replace it with --force")


def _architecture(file: WeightFile, renamed: Mapping[str, Tensor]) -> dict[str, Any]:
    """What the file states about its backbone, or what its tensors tell."""
    stated = file.section("recipe").get("backbone") or file.section("source").get("architecture")
    try:
        return dict(stated or architecture_from(renamed))
    except WeightsError as error:
        raise CheckError(f"{file.name}: {error}") from error


def _no_convention(file: WeightFile) -> None:
    raise WeightsError(
        f"{file.name} does not state its input convention (channel order, mean, std, stride), and "
        "it is not guessed; convert the file that it was made from"
    )


def _provenance(file: WeightFile, name: str, encoder: str, architecture: Mapping) -> dict[str, Any]:
    """Where a backbone comes from; facts that a converted file already states are kept."""
    earlier, recipe = file.section("source"), file.section("recipe")
    return {
        "file": file.name,
        "sha256": file.sha256(),
        "format": name,
        "encoder": encoder if FORMATS[name].encoders else earlier.get("encoder"),
        "iteration": file.meta.get("iteration", earlier.get("iteration")),
        "epochs": recipe.get("epochs", earlier.get("epochs")),
        "architecture": dict(architecture),
    }


def _check_features(reference: nn.Module, path: str) -> float:
    """Build a model from nothing but a written file, and compare it with the source's.

    Returns:
        the largest difference of the features.
    """
    written = read_weight_file(path)
    target = Detectron2Features(written.meta["source"]["architecture"], written.meta["input"])
    target.body.load_state_dict(written.state)
    difference = largest_difference(reference, target)
    # Written so that NaN fails.
    if not difference <= TOLERANCE:
        raise CheckError(
            f"the exported backbone gives other features than the source: they differ by up to "
            f"{difference:.1e}, and {TOLERANCE:.0e} is allowed; nothing was written"
        )
    return difference
