"""Batch norm in transfer: what the hardware can run."""

from detectron2.config import CfgNode

# torch's SyncBatchNorm, under both of detectron2's names for it. It needs GPUs.
SYNCHRONISED = ("SyncBN", "nnSyncBN")


def resolve_norms(cfg: CfgNode, world_size: int, has_cuda: bool) -> list[str]:
    """Replace synchronised BN everywhere in a config, in place, where it cannot run.

    With several GPUs it stays. Several processes without GPUs get detectron2's naiveSyncBN, which
    gloo runs; one process gets BN, which is the same there. Other norms are left alone.

    Args:
        cfg: not frozen. Every key named NORM is looked at, however deep.
        world_size: number of processes.
        has_cuda: whether the model runs on GPUs.

    Returns:
        one line for each key that changed.
    """
    if world_size > 1 and has_cuda:
        return []
    new, why = (
        ("BN", "the same with one process")
        if world_size == 1
        else ("naiveSyncBN", f"{world_size} processes without GPUs")
    )
    return _replace_(cfg, "", new, why)


def _replace_(node: CfgNode, path: str, new: str, why: str) -> list[str]:
    lines = []
    for key, value in node.items():
        if isinstance(value, CfgNode):
            lines += _replace_(value, f"{path}{key}.", new, why)
        elif key == "NORM" and value in SYNCHRONISED:
            node[key] = new
            lines.append(f"{path}{key}: {value} -> {new} ({why})")
    return lines
