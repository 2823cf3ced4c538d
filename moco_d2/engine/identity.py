"""What a checkpoint says of the run that it belongs to."""

from detectron2.config import CfgNode

from moco_d2.errors import UserError


class RunIdentity:
    """What a checkpoint records of its run: enough to export it, and to refuse a resume that would
    silently become another run."""

    def __init__(self, cfg: CfgNode, num_images: int):
        resnets, model = cfg.MODEL.RESNETS, cfg.MODEL
        self._values = {
            "meta_architecture": model.META_ARCHITECTURE,
            "input": {
                "format": cfg.INPUT.FORMAT,
                "pixel_mean": list(model.PIXEL_MEAN),
                "pixel_std": list(model.PIXEL_STD),
                "stride_in_1x1": resnets.STRIDE_IN_1X1,
            },
            "backbone": {
                "name": model.BACKBONE.NAME,
                "depth": resnets.DEPTH,
                "num_groups": resnets.NUM_GROUPS,
                "width_per_group": resnets.WIDTH_PER_GROUP,
                "res2_out_channels": resnets.RES2_OUT_CHANNELS,
                "stem_out_channels": resnets.STEM_OUT_CHANNELS,
                "norm": resnets.NORM,
                "out_features": list(resnets.OUT_FEATURES),
            },
            "dim": model.MOCO.DIM,
            "head": model.MOCO.HEAD,
            "seed": cfg.SEED,
            "num_images": num_images,
            "batch": cfg.SOLVER.IMS_PER_BATCH,
            "epochs": cfg.SOLVER.MAX_ITER * cfg.SOLVER.IMS_PER_BATCH / num_images,
        }

    def state_dict(self) -> dict:
        return self._values

    def load_state_dict(self, saved: dict) -> None:
        for name, option in (
            ("seed", "SEED"),
            ("num_images", "the size of DATASETS.TRAIN"),
            ("batch", "SOLVER.IMS_PER_BATCH"),
        ):
            if saved[name] != self._values[name]:
                raise UserError(
                    f"cannot resume: {option} is {self._values[name]} and was {saved[name]} in the "
                    "checkpoint, so the run would not go on with the same images; restore it, or "
                    "start a new run in another OUTPUT_DIR from MODEL.WEIGHTS"
                )
