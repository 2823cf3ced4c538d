"""The images that a detector's config trains on, and the loader of their batches."""

from collections.abc import Callable, Iterable

from detectron2.config import CfgNode
from detectron2.data import DatasetCatalog, MetadataCatalog, get_detection_dataset_dicts
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


def check_training_sets(cfg: CfgNode) -> None:
    """Refuse names that no data set is registered by, and keypoints without names; reads nothing.

    Raises:
        UserError: one sentence with the value and what to do.
    """
    known = DatasetCatalog.list()
    unknown = [name for name in cfg.DATASETS.TRAIN if name not in known]
    if unknown or not cfg.DATASETS.TRAIN:
        raise UserError(
            f"DATASETS.TRAIN is {tuple(cfg.DATASETS.TRAIN)}, and detectors and segmentors train on "
            "registered data sets: name one of detectron2's, or register yours "
            "(detectron2.data.datasets.register_coco_instances) in a script that starts the run"
        )
    for name in cfg.DATASETS.TRAIN if cfg.MODEL.KEYPOINT_ON else ():
        if not MetadataCatalog.get(name).get("keypoint_names"):
            raise UserError(
                f"MODEL.KEYPOINT_ON is True, and the metadata of {name!r} has no keypoint_names: "
                "name a data set of keypoints, or set MetadataCatalog.get(…).keypoint_names and "
                "keypoint_flip_map where you register it"
            )


# Meta-architecture that learns from annotations -> the key that says how many classes they have.
_CLASSES = {
    "GeneralizedRCNN": "ROI_HEADS",
    "PanopticFPN": "ROI_HEADS",
    "RetinaNet": "RETINANET",
    "ProposalNetwork": None,
}


def _check_annotations(cfg: CfgNode, samples: list[dict]) -> None:
    kind = cfg.MODEL.META_ARCHITECTURE
    if kind not in _CLASSES or not samples:
        return
    names = ", ".join(cfg.DATASETS.TRAIN)
    if not any("annotations" in sample for sample in samples):
        raise UserError(f"{names} has no annotations, which a {kind} learns from")
    if _CLASSES[kind] is None:
        return
    found = {a["category_id"] for sample in samples for a in sample.get("annotations", ())}
    classes = cfg.MODEL[_CLASSES[kind]].NUM_CLASSES
    if found and max(found) >= classes:
        raise UserError(
            f"MODEL.{_CLASSES[kind]}.NUM_CLASSES is {classes}, and annotations of {names} are of "
            f"classes up to number {max(found)}, from 0: set it to {max(found) + 1} or more"
        )


def training_samples(cfg: CfgNode) -> list[dict]:
    """The dicts of DATASETS.TRAIN that a run trains on.

    Raises:
        UserError: they have no annotations, or classes that the model has no scores for;
            DATASETS.FEW_LABELS asks for more images than there are.
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
    _check_annotations(cfg, samples)
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
