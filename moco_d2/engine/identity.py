"""What a checkpoint says of the run that it belongs to."""

from detectron2.config import CfgNode

from moco_d2.engine.backbones import backbone_architecture
from moco_d2.errors import UserError

_IMAGES = "the same images"


class RunIdentity:
    """What a checkpoint records of its run: enough to export it, and to refuse a resume that would
    silently become another run."""

    def __init__(self, cfg: CfgNode, num_images: int):
        model = cfg.MODEL
        self._values = {
            "meta_architecture": model.META_ARCHITECTURE,
            "input": {
                "format": cfg.INPUT.FORMAT,
                "pixel_mean": list(model.PIXEL_MEAN),
                "pixel_std": list(model.PIXEL_STD),
                "stride_in_1x1": model.RESNETS.STRIDE_IN_1X1,
            },
            "backbone": backbone_architecture(cfg),
            "seed": cfg.SEED,
            "num_images": num_images,
            "batch": cfg.SOLVER.IMS_PER_BATCH,
            "epochs": cfg.SOLVER.MAX_ITER * cfg.SOLVER.IMS_PER_BATCH / num_images,
        }
        if model.META_ARCHITECTURE != "ImageClassifier":
            self._values |= {"dim": model.MOCO.DIM, "head": model.MOCO.HEAD}
        if model.META_ARCHITECTURE == "MoCo":
            moco = model.MOCO
            self._values |= {"dictionary": moco.DICTIONARY, "queue_size": moco.QUEUE_SIZE}

    def state_dict(self) -> dict:
        return self._values

    def load_state_dict(self, saved: dict) -> None:
        for name, option, lost in (
            ("seed", "SEED", _IMAGES),
            ("num_images", "the size of DATASETS.TRAIN", _IMAGES),
            ("batch", "SOLVER.IMS_PER_BATCH", _IMAGES),
            ("dictionary", "MODEL.MOCO.DICTIONARY", "the same keys"),
            ("queue_size", "MODEL.MOCO.QUEUE_SIZE", "the same keys"),
        ):
            if name in self._values and saved[name] != self._values[name]:
                raise UserError(
                    f"cannot resume: {option} is {self._values[name]} and was {saved[name]} in the "
                    f"checkpoint, so the run would not go on with {lost}; restore it, or start a "
                    "new run in another OUTPUT_DIR from MODEL.WEIGHTS"
                )
