"""Dense pose estimation by DensePose, a project in detectron2's repository, where it is installed.

Everything of it is imported when a config asks for it: the keys of its config, its RoI heads and
data sets, the reading and flipping of its annotations, and its evaluator.
"""

from detectron2.config import CfgNode
from detectron2.data import DatasetCatalog, MetadataCatalog
from detectron2.evaluation import DatasetEvaluator, DatasetEvaluators
from detectron2.utils.file_io import PathManager

from moco_d2.engine.configs import read_config_file
from moco_d2.errors import UserError

# What an annotation of DensePose has.
_KEYS = ("dp_x", "dp_y", "dp_I", "dp_U", "dp_V")


def add_densepose_keys(cfg: CfgNode, config_file: str) -> None:
    """Add DensePose's keys to a config, in place, if a config file or its bases have them.

    Raises:
        UserError: they do, and DensePose is not installed.
    """
    if "DENSEPOSE_ON" not in (read_config_file(config_file).get("MODEL") or {}):
        return
    try:
        from densepose import add_dataset_category_config, add_densepose_config
    except ImportError as error:
        raise UserError(
            f"{config_file} is for DensePose, a project in detectron2's repository, and importing "
            f"it says: {error}; install it with: pip install --no-deps 'git+https://github.com/"
            "facebookresearch/detectron2#subdirectory=projects/DensePose' && pip install av scipy"
        ) from error
    add_densepose_config(cfg)
    add_dataset_category_config(cfg)


def uses_densepose(cfg: CfgNode) -> bool:
    return bool(cfg.MODEL.get("DENSEPOSE_ON", False))


def register_densepose() -> None:
    """Make this process know DensePose's heads and data sets, and how these are evaluated."""
    import densepose  # noqa: F401 (registers by import)

    # Its evaluator gives a time limit to downloads, which not every kind of path knows.
    PathManager.set_strict_kwargs_checking(False)
    for name in DatasetCatalog.list():
        metadata = MetadataCatalog.get(name)
        if metadata.get("densepose_transform_src") and not metadata.get("evaluator_type"):
            metadata.evaluator_type = "densepose"


def densepose_samples(cfg: CfgNode) -> list[dict]:
    """The dicts of DATASETS.TRAIN in which a person has dense annotations."""
    from densepose.data.build import combine_detection_dataset_dicts

    return combine_detection_dataset_dicts(
        cfg.DATASETS.TRAIN,
        keep_instance_predicate=lambda sample: any(
            all(key in annotation for key in _KEYS) for annotation in sample["annotations"]
        ),
    )


def densepose_mapper(cfg: CfgNode):
    """What turns such a dict into the model's input, augmented."""
    from densepose.data import DatasetMapper

    return DatasetMapper(cfg, is_train=True)


def densepose_test_loader(cfg: CfgNode, name: str):
    from densepose.data import DatasetMapper, build_detection_test_loader

    return build_detection_test_loader(cfg, name, mapper=DatasetMapper(cfg, is_train=False))


def densepose_evaluator(cfg: CfgNode, name: str, folder: str) -> DatasetEvaluator:
    """Of boxes ("bbox") and dense poses ("densepose_gps", geodesic point similarity)."""
    from densepose.evaluation import DensePoseCOCOEvaluator
    from densepose.evaluation.d2_evaluator_adapter import Detectron2COCOEvaluatorAdapter

    settings = cfg.DENSEPOSE_EVALUATION
    return DatasetEvaluators(
        [
            Detectron2COCOEvaluatorAdapter(name, output_dir=folder),
            DensePoseCOCOEvaluator(
                name,
                distributed=True,
                output_dir=folder,
                evaluator_type=settings.TYPE,
                min_iou_threshold=settings.MIN_IOU_THRESHOLD,
            ),
        ]
    )
