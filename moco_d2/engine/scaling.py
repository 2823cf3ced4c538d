"""The hardware rule of transfer: the same images per process on any number of processes."""

from detectron2.config import CfgNode
from detectron2.engine import DefaultTrainer

from moco_d2.engine.norm import has_batch_norm
from moco_d2.errors import UserError

_SCALED = (
    "SOLVER.IMS_PER_BATCH",
    "SOLVER.BASE_LR",
    "SOLVER.MAX_ITER",
    "SOLVER.STEPS",
    "SOLVER.WARMUP_ITERS",
    "SOLVER.CHECKPOINT_PERIOD",
    "TEST.EVAL_PERIOD",
    "TEST.PRECISE_BN.NUM_ITER",
)


def scale_to_processes(cfg: CfgNode, world_size: int) -> tuple[CfgNode, list[str]]:
    """Scale a recipe for SOLVER.REFERENCE_WORLD_SIZE processes linearly to another number.

    detectron2's rule, which is the one that MoCo's authors give for fewer GPUs
    (facebookresearch/moco#11): batch and learning rate in proportion, all that counts iterations
    in inverse proportion, so that a run sees as many images and the learning rate per image
    stays. Here it includes the iterations of precise BN. With REFERENCE_WORLD_SIZE 0, or the number
    that is there, nothing changes.

    Args:
        cfg: not frozen; left as it is.
        world_size: number of processes.

    Returns:
        the scaled config, not frozen, and a line for each key that changed and for what it costs.

    Raises:
        UserError: no process would have a whole number of images.
    """
    reference, batch = cfg.SOLVER.REFERENCE_WORLD_SIZE, cfg.SOLVER.IMS_PER_BATCH
    if reference in (0, world_size):
        if batch % world_size:
            raise UserError(
                f"SOLVER.IMS_PER_BATCH {batch} does not divide by {world_size} processes; give "
                "another batch or another number of processes"
            )
        return cfg, []
    if batch % reference:
        raise UserError(
            f"SOLVER.IMS_PER_BATCH {batch} is for SOLVER.REFERENCE_WORLD_SIZE {reference} "
            "processes, and does not divide by them; set REFERENCE_WORLD_SIZE 0 to take this "
            "batch on any number of processes"
        )
    scaled = DefaultTrainer.auto_scale_workers(cfg, world_size)
    precise = scaled.TEST.PRECISE_BN
    precise.NUM_ITER = max(1, round(precise.NUM_ITER * reference / world_size))
    why = f"(SOLVER.REFERENCE_WORLD_SIZE {reference} -> {world_size})"
    notes = [
        f"{key} {before} -> {after} {why}"
        for key in _SCALED
        if (before := _shown(cfg, key)) != (after := _shown(scaled, key))
    ]
    if world_size < reference and has_batch_norm(cfg):
        notes.append(
            f"batch norm sees {scaled.SOLVER.IMS_PER_BATCH} images instead of {batch}; "
            "SOLVER.REFERENCE_WORLD_SIZE 0 keeps the whole batch, if it fits"
        )
    return scaled, notes


class SavedBatch:
    """Puts a run's batch into its checkpoints, and refuses to resume with another.

    On another number of processes the recipe is scaled another way: what was counted in iterations
    would not be the images that were seen.
    """

    def __init__(self, cfg: CfgNode):
        self._batch, self._folder = cfg.SOLVER.IMS_PER_BATCH, cfg.OUTPUT_DIR

    def state_dict(self) -> dict[str, int]:
        return {"batch": self._batch}

    def load_state_dict(self, saved: dict[str, int]) -> None:
        """
        Raises:
            UserError: the checkpoint is of a run with another batch.
        """
        if saved["batch"] != self._batch:
            raise UserError(
                f"cannot resume: SOLVER.IMS_PER_BATCH is {self._batch} and was {saved['batch']} in "
                "the checkpoint, so its iterations are not those of this recipe; the run goes on "
                f"on any number of processes with --config-file {self._folder}/config.yaml "
                "SOLVER.REFERENCE_WORLD_SIZE 0"
            )


def _shown(cfg: CfgNode, key: str) -> str:
    value = cfg
    for part in key.split("."):
        value = value[part]
    return f"{value:g}" if isinstance(value, float) else str(value)
