"""The studies of tools/ablate.py: named grids of pretraining recipes on the built-in data."""

from dataclasses import dataclass, field, replace
from pathlib import Path

from moco_d2.errors import UserError
from moco_d2.transfer.cells import REPOSITORY

DEMO = REPOSITORY / "configs/demo"
MOCO_V2 = DEMO / "moco_pretrain.yaml"


@dataclass(frozen=True)
class Variant:
    """One recipe of a grid.

    Attributes:
        name: of its folder and its row.
        options: what it changes in its config.
        config: the grid's where None.
        batch: images per step, with iterations, warm-up and lr in proportion; 0: the config's.
        length: share of the iterations that it trains for.
        kind: random (not trained at all), supervised or pretrained.
    """

    name: str
    options: dict[str, str] = field(default_factory=dict)
    config: Path | None = None
    batch: int = 0
    length: float = 1.0
    kind: str = "pretrained"


@dataclass(frozen=True)
class Grid:
    """A study: what it asks, where the paper asks it, and its variants."""

    question: str
    source: str
    variants: tuple[Variant, ...]
    config: Path = MOCO_V2


def _values(key: str, prefix: str, *values: float) -> tuple[Variant, ...]:
    return tuple(Variant(f"{prefix}{value:g}", {key: str(value)}) for value in values)


def _sizes(name: str, config: Path, *sizes: int) -> tuple[Variant, ...]:
    return tuple(
        Variant(f"{name}_K{size}", {"MODEL.MOCO.QUEUE_SIZE": str(size)}, config) for size in sizes
    )


FEW = "DATASETS.FEW_LABELS"
V1_HEAD = {"MODEL.MOCO.HEAD": "linear", "MODEL.MOCO.TEMPERATURE": "0.07"}
V1_VIEWS = {
    "INPUT.VIEWS.QUERY": "moco_v1",
    "INPUT.VIEWS.KEY": "moco_v1",
    "INPUT.VIEWS.MIN_CROP": "0.4",  # less shows less than an object
}
V1_SCHEDULE = {"SOLVER.LR_SCHEDULER_NAME": "WarmupMultiStepLR", "SOLVER.GAMMA": "0.1"}
# The lr drops at 60 % and 80 % of the iterations, as at 120 and 160 of 200 epochs.
V1_DROPS = (0.6, 0.8)

GRIDS: dict[str, Grid] = {
    "momentum": Grid(
        "How slowly must the key encoder move?",
        "MoCo v1 (arXiv 1911.05722), Sec. 4.1, ablation: momentum",
        _values("MODEL.MOCO.MOMENTUM", "m", 0.0, 0.9, 0.99, 0.995, 0.999, 0.9999),
    ),
    "dictionary": Grid(
        "How many negatives, and where from?",
        "MoCo v1 (arXiv 1911.05722), Figure 3; end-to-end, K is the batch less one",
        (
            *_sizes("queue", MOCO_V2, 64, 256, 1024, 4096),
            *_sizes("memory_bank", DEMO / "memory_bank.yaml", 64, 256, 1024, 4096),
            *(
                Variant(f"endtoend_K{batch - 1}", {}, DEMO / "endtoend.yaml", batch)
                for batch in (64, 128, 256)
            ),
        ),
    ),
    "shuffle": Grid(
        "Does batch norm leak which key is whose?",
        "MoCo v1 (arXiv 1911.05722), Sec. 3.3 and A.9",
        (
            Variant("shuffled"),
            Variant("not_shuffled", {"MODEL.MOCO.SHUFFLE_BN": "False"}),
        ),
    ),
    "steps": Grid(
        "What of v2 helps?",
        "MoCo v2 (arXiv 2003.04297), Table 1: MLP head, stronger views, cosine schedule",
        (
            Variant("v1", {**V1_HEAD, **V1_VIEWS, **V1_SCHEDULE}),
            Variant("mlp", {**V1_VIEWS, **V1_SCHEDULE}),
            Variant("views", {**V1_HEAD, **V1_SCHEDULE}),
            Variant("mlp_views", V1_SCHEDULE),
            Variant("mlp_views_cosine"),
        ),
    ),
    "temperature": Grid(
        "How much more do the hardest negatives count?",
        "MoCo v2 (arXiv 2003.04297), Sec. 3: temperature",
        _values("MODEL.MOCO.TEMPERATURE", "t", 0.05, 0.07, 0.1, 0.2, 0.5),
    ),
    "methods": Grid(
        "Which pretraining, with how many labels, for how long?",
        "MoCo v1, v2 and v3, and what they are compared with",
        (
            Variant("random", kind="random"),
            Variant("supervised", config=DEMO / "supervised.yaml", kind="supervised"),
            # Six images of each class: about as many as detection has pictures; and ten times as
            # many. Half the steps show each of them 533 and 52 times.
            Variant("supervised_96", {FEW: "6.0"}, DEMO / "supervised.yaml", length=0.5),
            Variant("supervised_992", {FEW: "62.0"}, DEMO / "supervised.yaml", length=0.5),
            Variant("endtoend", config=DEMO / "endtoend.yaml"),
            Variant("memory_bank", config=DEMO / "memory_bank.yaml"),
            Variant("moco_v1", config=DEMO / "moco_v1.yaml"),
            Variant("moco_v2"),
            Variant("moco_v2_long", length=2.5),
            # Both views are queries and keys: as much computing comes of half the images.
            Variant("moco_v3", config=DEMO / "moco_v3.yaml", batch=128, length=0.5),
        ),
    ),
}


def select_grid(text: str) -> tuple[str, Grid]:
    """A grid by its name, with all its variants or some.

    Args:
        text: NAME, or NAME:VARIANT,VARIANT; the variants stay in the grid's order.

    Returns:
        name, grid.

    Raises:
        UserError: there is no such grid or variant.
    """
    name, _, chosen = text.partition(":")
    if name not in GRIDS:
        raise UserError(f"there is no grid {name!r}: give some of {', '.join(GRIDS)}")
    grid, wanted = GRIDS[name], chosen.split(",") if chosen else []
    known = [variant.name for variant in grid.variants]
    unknown = [variant for variant in wanted if variant not in known]
    if unknown:
        raise UserError(
            f"grid {name} has no variant {unknown[0]!r}: give some of {', '.join(known)}"
        )
    kept = tuple(v for v in grid.variants if not wanted or v.name in wanted)
    return name, replace(grid, variants=kept)
