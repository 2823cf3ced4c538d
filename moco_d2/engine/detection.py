"""The images that a detector's config trains on, and the loader of their batches."""

from collections.abc import Callable, Iterable

from detectron2.config import CfgNode
from detectron2.data import get_detection_dataset_dicts
from detectron2.data.samplers import RepeatFactorTrainingSampler
from detectron2.utils import comm

from moco_d2.data.detection import (
    RepeatedStream,
    ShareSampler,
    build_detection_loader,
    wide_images,
)
from moco_d2.data.few_labels import few_images
from moco_d2.data.streams import SampleStream
from moco_d2.engine.densepose import densepose_samples, uses_densepose
from moco_d2.errors import UserError


def _every_image(cfg: CfgNode, samples: list[dict]) -> SampleStream:
    return SampleStream(len(samples), cfg.SEED)


def _rare_classes_more_often(cfg: CfgNode, samples: list[dict]) -> RepeatedStream:
    repeats = RepeatFactorTrainingSampler.repeat_factors_from_category_frequency(
        samples, cfg.DATALOADER.REPEAT_THRESHOLD, sqrt=cfg.DATALOADER.REPEAT_SQRT
    )
    return RepeatedStream(repeats.tolist(), cfg.SEED)


# DATALOADER.SAMPLER_TRAIN -> (config, samples) -> the images of each epoch.
STREAMS: dict[str, Callable[[CfgNode, list[dict]], SampleStream | RepeatedStream]] = {
    "TrainingSampler": _every_image,
    "RepeatFactorTrainingSampler": _rare_classes_more_often,
}


def check_sampler(cfg: CfgNode) -> None:
    """Refuse a sampler of which nothing is known but its name."""
    if cfg.DATALOADER.SAMPLER_TRAIN not in STREAMS:
        raise UserError(
            f"DATALOADER.SAMPLER_TRAIN is {cfg.DATALOADER.SAMPLER_TRAIN!r}; known: "
            f"{', '.join(STREAMS)}"
        )


def training_samples(cfg: CfgNode) -> list[dict]:
    """The dicts of DATASETS.TRAIN that a run trains on.

    Raises:
        UserError: DATASETS.FEW_LABELS asks for more images than there are.
    """
    if uses_densepose(cfg):
        samples = densepose_samples(cfg)
    else:
        samples = get_detection_dataset_dicts(
            cfg.DATASETS.TRAIN,
            filter_empty=cfg.DATALOADER.FILTER_EMPTY_ANNOTATIONS,
            min_keypoints=(
                cfg.MODEL.ROI_KEYPOINT_HEAD.MIN_KEYPOINTS_PER_IMAGE if cfg.MODEL.KEYPOINT_ON else 0
            ),
            proposal_files=cfg.DATASETS.PROPOSAL_FILES_TRAIN if cfg.MODEL.LOAD_PROPOSALS else None,
        )
    return [samples[i] for i in few_images(len(samples), cfg.DATASETS.FEW_LABELS, cfg.SEED)]


def build_loader(
    cfg: CfgNode, mapper: Callable[[dict], dict], start_iter: int
) -> Iterable[list[dict]]:
    """This process's batches from an iteration on; see `moco_d2.data.detection`.

    Args:
        mapper: turns a sample into the model's input, augmented.
        start_iter: iteration of the first batch.
    """
    samples, loader = training_samples(cfg), cfg.DATALOADER
    sampler = ShareSampler(
        STREAMS[loader.SAMPLER_TRAIN](cfg, samples),
        share=cfg.SOLVER.IMS_PER_BATCH // comm.get_world_size(),
        wide=wide_images(samples) if loader.ASPECT_RATIO_GROUPING else None,
        start_iter=start_iter,
        num_iters=max(0, cfg.SOLVER.MAX_ITER - start_iter),
        rank=comm.get_rank(),
        world_size=comm.get_world_size(),
    )
    return build_detection_loader(
        samples, mapper, sampler, seed=cfg.SEED, num_workers=loader.NUM_WORKERS
    )
