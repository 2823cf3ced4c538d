"""Read a weight file, write a backbone in the names of another library, prove what was written."""

import json
import os
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from torch import nn

from moco_d2.checkpoint.files import (
    CheckError,
    WeightsError,
    read_weight_file,
    replaced_file,
    write_weight_file,
)
from moco_d2.checkpoint.naming import NAMINGS, Naming, rename
from moco_d2.checkpoint.reading import Backbone, read_backbone
from moco_d2.checkpoint.table import FORMATS
from moco_d2.checkpoint.verify import architecture_title, compare_tensors, largest_difference

TOLERANCE = 1e-5


@dataclass(frozen=True)
class ConversionReport:
    """What a conversion did.

    Attributes:
        output: path of the written file.
        target: whose names it has, a key of `NAMINGS`.
        exported: number of backbone tensors written.
        expected: number of tensors that the backbone has.
        mapped: name of a tensor in the source -> its name in the written file.
        dropped: name of a tensor that was left out -> why.
        added: names in the written file of tensors that follow from others of the source.
        difference: largest difference of the features between source and written file.
        input: the input convention that was written.
        source: provenance that was written.
    """

    output: str
    target: str
    exported: int
    expected: int
    mapped: dict[str, str]
    dropped: dict[str, str]
    added: list[str]
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
                + f", {architecture_title(architecture)}",
                f"{self.exported} of {self.expected} backbone tensors exported, "
                f"{len(self.dropped)} dropped" + (f": {details}" if details else ""),
                "input: " + ", ".join(f"{key} {value}" for key, value in self.input.items()),
                "largest difference to the features of the source: "
                f"{self.difference:.1e} (at most {TOLERANCE:.0e})",
                f"wrote {self.output} in the names of {NAMINGS[self.target].title}",
            ]
        )


def convert(
    source: str,
    output: str,
    *,
    target: str = "detectron2",
    source_format: str | None = None,
    encoder: str | None = None,
    convention: Mapping[str, Any] | None = None,
    num_heads: int | None = None,
    unsafe_pickle: bool = False,
    report: str | None = None,
    force: bool = False,
) -> ConversionReport:
    """Write the backbone of a weight file in the names of a library, and check what was written.

    The output appears at its place only after all checks have passed.

    Args:
        source: a file of one of the formats in `table.FORMATS`.
        output: ends in one of the target's `suffixes`.
        target: key of `naming.NAMINGS`.
        source_format, encoder, convention, num_heads, unsafe_pickle: see `reading.read_backbone`.
        report: where to write what was done, as JSON.
        force: replace an existing output and report.

    Raises:
        WeightsError: the source, the output or an argument cannot be used.
        CheckError: a tensor is missing, left over or of another shape, or the written backbone
            gives other features than the source's.
    """
    if target not in NAMINGS:
        raise WeightsError(f"there is no target {target!r}; known: {', '.join(NAMINGS)}")
    naming = NAMINGS[target]
    _check_output(source, output, naming.suffixes, force)
    if report is not None:
        _check_output(source, report, (".json",), force)
    backbone = read_backbone(
        source,
        source_format=source_format,
        encoder=encoder,
        convention=convention,
        num_heads=num_heads,
        unsafe_pickle=unsafe_pickle,
    )
    names = {n: rename(n, naming.from_detectron2) for n in backbone.tensors}
    tensors = {names[n]: tensor for n, tensor in backbone.tensors.items()}
    order = _check_fits(backbone, naming, tensors)
    tensors = {n: tensors[n] for n in order if n in tensors}
    dropped = dict(backbone.dropped)
    if naming.keeps_extras:
        names |= {n: rename(n, naming.from_detectron2) for n in backbone.extras}
        tensors |= {names[n]: tensor for n, tensor in backbone.extras.items()}
    else:
        dropped |= {backbone.origin[n]: "not used by detectron2" for n in backbone.extras}
    provenance = _provenance(backbone)
    content = {
        naming.state_key: tensors,
        **naming.marks,
        "input": backbone.convention,
        "source": provenance,
    }
    with replaced_file(output) as aside:
        write_weight_file(aside, content, naming.state_key)
        difference = _check_features(backbone.source_network, aside, naming)
    done = ConversionReport(
        output=output,
        target=target,
        exported=len(tensors),
        expected=backbone.expected + len(tensors) - len(backbone.tensors),
        mapped={backbone.origin[n]: names[n] for n in names if n in backbone.origin},
        dropped=dropped,
        added=[names[n] for n in backbone.added],
        difference=difference,
        input=backbone.convention,
        source=provenance,
    )
    if report is not None:
        with replaced_file(report) as aside, open(aside, "w") as f:
            json.dump(asdict(done), f, indent=1)
    return done


def _check_output(source: str, output: str, suffixes: tuple[str, ...], force: bool) -> None:
    folder = os.path.dirname(os.path.abspath(output))
    if not output.endswith(suffixes):
        raise WeightsError(f"the output {output} must end in {' or '.join(suffixes)}")
    if not os.path.isdir(folder):
        raise WeightsError(f"the folder of the output {output} does not exist")
    if os.path.exists(output):
        if os.path.exists(source) and os.path.samefile(source, output):
            raise WeightsError(f"the output {output} is the source itself; name another file")
        if not force:
            raise WeightsError(f"{output} exists; name another file, or replace it with --force")


def _check_fits(backbone: Backbone, naming: Naming, tensors: Mapping) -> list[str]:
    """
    Returns:
        the names of the other library's network, in its order.

    Raises:
        WeightsError: the other library's network does not have such a backbone.
    """
    if naming is not NAMINGS["detectron2"] and backbone.convention["stride_in_1x1"]:
        raise WeightsError(
            f"{backbone.file.name} has its strides in 1x1 convolutions, and {naming.title}'s "
            "ResNets have them in 3x3 ones: there it would give other features"
        )
    needed = naming.network(backbone.architecture, backbone.convention).body.state_dict()
    mismatch = compare_tensors(needed, tensors)
    if mismatch:
        raise WeightsError(
            f"{naming.title} has no network like {architecture_title(backbone.architecture)} of "
            f"{backbone.file.name} - {mismatch}"
        )
    return list(needed)


def _provenance(backbone: Backbone) -> dict[str, Any]:
    """Where a backbone comes from; facts that a converted file already states are kept."""
    file = backbone.file
    earlier, recipe = file.section("source"), file.section("recipe")
    epoch = file.meta.get("epoch", earlier.get("epoch"))
    return {
        "file": file.name,
        "sha256": file.sha256(),
        "format": backbone.format,
        "encoder": backbone.encoder or earlier.get("encoder"),
        "iteration": file.meta.get("iteration", earlier.get("iteration")),
        "epochs": recipe.get("epochs", earlier.get("epochs")),
        "epoch": epoch if type(epoch) is int else None,
        "architecture": dict(backbone.architecture),
    }


def _check_features(source: nn.Module, path: str, naming: Naming) -> float:
    """Build a network from nothing but a written file, and compare it with the source's.

    Returns:
        the largest difference of the features.
    """
    written = read_weight_file(path)
    target = naming.network(written.meta["source"]["architecture"], written.meta["input"])
    needed = target.body.state_dict()
    target.body.load_state_dict({n: t for n, t in written.state.items() if n in needed})
    difference = largest_difference(source, target)
    # Written so that NaN fails.
    if not difference <= TOLERANCE:
        raise CheckError(
            f"the exported backbone gives other features than the source: they differ by up to "
            f"{difference:.1e}, and {TOLERANCE:.0e} is allowed; nothing was written"
        )
    return difference
