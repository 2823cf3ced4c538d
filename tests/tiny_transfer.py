"""A detector small enough to train in a test, on four pictures of 64 pixels."""

from pathlib import Path

from detectron2.config import get_cfg

from moco_d2 import add_moco_config

DEMO = "configs/demo/scenes_faster_rcnn_R18_FPN.yaml"


def tiny_config(output, weights="", **options):
    """The demo's detector on `tiny_train`, for three steps."""
    Path(output).mkdir(exist_ok=True)
    cfg = get_cfg()
    add_moco_config(cfg)
    cfg.merge_from_file(DEMO)
    settings = {
        "DATASETS.TRAIN": ("tiny_train",),
        "DATASETS.TEST": ("tiny_train",),
        "DATALOADER.NUM_WORKERS": 0,
        "INPUT.MIN_SIZE_TRAIN": (64,),
        "INPUT.MIN_SIZE_TEST": 64,
        "MODEL.DEVICE": "cpu",
        "MODEL.WEIGHTS": weights,
        "MODEL.FPN.OUT_CHANNELS": 16,
        "MODEL.ROI_HEADS.NUM_CLASSES": 2,
        "MODEL.ROI_HEADS.SCORE_THRESH_TEST": 0.0,
        "MODEL.ROI_BOX_HEAD.FC_DIM": 16,
        "OUTPUT_DIR": str(output),
        "SEED": 1,
        "SOLVER.IMS_PER_BATCH": 2,
        "SOLVER.MAX_ITER": 3,
        "SOLVER.STEPS": (),
        "SOLVER.WARMUP_ITERS": 0,
        "TEST.PRECISE_BN.NUM_ITER": 2,
        "LOG_PERIOD": 1,
    }
    settings.update({key.replace("__", "."): value for key, value in options.items()})
    cfg.merge_from_list([item for pair in settings.items() for item in pair])
    return cfg
