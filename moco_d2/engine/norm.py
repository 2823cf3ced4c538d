"""Batch norm in transfer: what the hardware can run, and over how many images."""

from collections.abc import Iterator

from detectron2.config import CfgNode
from detectron2.layers import get_norm

from moco_d2.errors import UserError

# torch's SyncBatchNorm, under both of detectron2's names for it. It needs GPUs.
SYNCHRONISED = ("SyncBN", "nnSyncBN")


def resolve_norms(cfg: CfgNode, world_size: int, has_cuda: bool) -> list[str]:
    """Replace synchronised BN everywhere in a config, in place, where it cannot run.

    With several GPUs it stays. Several processes without GPUs get detectron2's naiveSyncBN, which
    gloo runs; one process gets BN, which is the same there. Other norms are left alone. The norm
    of the backbone, MODEL.RESNETS.NORM, is also that after res5 in C4 detectors and that of DC5's
    convolution.

    Args:
        cfg: not frozen, with the batch that runs. Every key named NORM is looked at, however deep.
        world_size: number of processes.
        has_cuda: whether the model runs on GPUs.

    Returns:
        one line for each key that changed, and one for each whose statistics are of less than the
        batch.
    """
    batch, lines = cfg.SOLVER.IMS_PER_BATCH, []
    for path, node in _norms(cfg, ""):
        norm = node.NORM
        if norm in SYNCHRONISED and world_size == 1:
            node.NORM = "BN"
            lines.append(f"{path}: {norm} -> BN (the same with one process, all {batch} images)")
        elif norm in SYNCHRONISED and not has_cuda:
            node.NORM = "naiveSyncBN"
            lines.append(
                f"{path}: {norm} -> naiveSyncBN ({world_size} processes without GPUs; statistics "
                f"of all {batch} images, as before)"
            )
        elif norm == "BN" and world_size > 1:
            lines.append(
                f"{path}: BN has statistics of the {batch // world_size} images of each process; "
                f"SyncBN has those of all {batch}"
            )
    return lines


def check_norms(cfg: CfgNode) -> None:
    """
    Raises:
        UserError: a key named NORM has a value that detectron2 does not know.
    """
    for path, node in _norms(cfg, ""):
        try:
            get_norm(node.NORM, 32)  # channels that divide into GN's groups
        except KeyError as error:
            raise UserError(
                f"{path} is {node.NORM!r}; known: BN, SyncBN, naiveSyncBN, FrozenBN, GN, LN, and "
                "'' for none"
            ) from error


def has_batch_norm(cfg: CfgNode) -> bool:
    """Whether a norm of the config takes statistics over images."""
    return any("BN" in node.NORM and node.NORM != "FrozenBN" for _, node in _norms(cfg, ""))


def _norms(node: CfgNode, path: str) -> Iterator[tuple[str, CfgNode]]:
    """Every key NORM: its full name and the node that has it."""
    for key, value in node.items():
        if isinstance(value, CfgNode):
            yield from _norms(value, f"{path}{key}.")
        elif key == "NORM":
            yield path + key, node
