"""Training on a stream of single images: what pretraining and classification share."""

import functools
import logging
from collections.abc import Iterator

from detectron2.config import CfgNode
from detectron2.utils import comm
from detectron2.utils.env import seed_all_rng
from torch import nn

from moco_d2.checkpoint.checkpointer import AtomicCheckpointer
from moco_d2.data.build import PretrainLoader, build_pretrain_loader, pixel_options
from moco_d2.data.datasets import ImageIndex, load_image_index
from moco_d2.data.few_labels import few_per_class
from moco_d2.data.labels import load_labelled_index
from moco_d2.data.unreadable import UnreadableImages
from moco_d2.engine import recipe
from moco_d2.engine.base import BaseTrainer
from moco_d2.engine.compilation import compile_encoders_
from moco_d2.engine.hooks import AverageRunningStatistics, UnreadableImagesCheck
from moco_d2.engine.identity import RunIdentity
from moco_d2.engine.spikes import SpikeCounter
from moco_d2.engine.values import check_image_values
from moco_d2.solver.build import build_pretrain_optimizer

logger = logging.getLogger(__name__)


@functools.lru_cache(maxsize=4)
def training_images(
    names: tuple[str, ...], labelled: bool = False, few: float = 0.0, seed: int = 0
) -> ImageIndex:
    """The index of DATASETS.TRAIN, read once per process.

    Args:
        labelled: every image must have a label.
        few: what is kept of each class, see `few_labels.py`.
        seed: what is drawn depends on it.
    """
    if not labelled:
        return load_image_index(names)
    images = load_labelled_index(names, "DATASETS.TRAIN")
    return images.take(few_per_class(images.labels, few, seed)) if few else images


class ImageTrainer(BaseTrainer):
    """Trains on the images of DATASETS.TRAIN, batches being places of a stream that depends on the
    seed alone. Subclasses say which views, what is checked and how it is evaluated."""

    def __init__(self, cfg: CfgNode):
        self.num_images = len(self.training_images(cfg))
        self._unreadable = UnreadableImages(self.num_images, cfg.DATALOADER.MAX_UNREADABLE)
        self._spikes = SpikeCounter()
        super().__init__(cfg)

    @classmethod
    def training_images(cls, cfg: CfgNode) -> ImageIndex:
        """The images that are trained on."""
        return training_images(tuple(cfg.DATASETS.TRAIN))

    @classmethod
    def check(cls, cfg: CfgNode, images: ImageIndex, world_size: int) -> list[str]:
        """Refuse what cannot run or learn; complete the config, which is not frozen, in place.

        Returns:
            notes on what was chosen, and warnings of what runs but is known to go wrong.

        Raises:
            UserError: one sentence with the value and what to set instead.
        """
        raise NotImplementedError

    @classmethod
    def recipe_rows(cls, cfg: CfgNode, images: ImageIndex) -> list[tuple[str, str]]:
        """What the table of the effective recipe says besides `recipe.image_rows`."""
        raise NotImplementedError

    @classmethod
    def view_recipes(cls, cfg: CfgNode) -> tuple[str, ...]:
        """The view recipe of each of an image's views."""
        raise NotImplementedError

    @classmethod
    def load_weights_(cls, cfg: CfgNode, model: nn.Module, path: str, whole: bool) -> str:
        """Fill a model from a file.

        Args:
            whole: the model is not going to be trained.

        Returns:
            what was loaded, in words.

        Raises:
            WeightsError, CheckError: the file does not fit; nothing is loaded.
        """
        raise NotImplementedError

    @classmethod
    def effective_config(cls, cfg, world_size):
        cfg, notes = super().effective_config(cfg, world_size)
        cfg.defrost()
        check_image_values(cfg, cls.view_recipes(cfg))
        notes += recipe.resolve_seed(cfg)
        images = cls.training_images(cfg)
        checked = cls.check(cfg, images, world_size)
        notes += recipe.resolve_schedule(cfg, len(images))
        if cfg.TEST.PRECISE_BN.ENABLED:
            cfg.TEST.PRECISE_BN.ENABLED = False
            notes.append(
                "TEST.PRECISE_BN.ENABLED True -> False: it is for detectors; here statistics are "
                "those of the stated BN groups"
            )
        cfg.freeze()
        return cfg, notes + checked

    @classmethod
    def describe(cls, cfg, world_size, notes):
        images = cls.training_images(cfg)
        rows = recipe.common_rows(cfg, world_size) + recipe.image_rows(cfg, len(images))
        return recipe.recipe_table(rows + cls.recipe_rows(cfg, images), notes)

    @classmethod
    def build_model(cls, cfg):
        seed_all_rng(cfg.SEED)  # the same initial weights on every process
        model = super().build_model(cfg)
        if cfg.MODEL.COMPILE:
            compile_encoders_(model)
        return model

    @classmethod
    def build_optimizer(cls, cfg, model):
        return build_pretrain_optimizer(cfg, model)

    @classmethod
    def build_train_loader(cls, cfg, start_iter: int = 0) -> PretrainLoader:
        return build_pretrain_loader(
            cls.training_images(cfg),
            batch_size=cfg.SOLVER.IMS_PER_BATCH,
            size=cfg.INPUT.VIEWS.SIZE,
            recipes=cls.view_recipes(cfg),
            seed=cfg.SEED,
            start_iter=start_iter,
            num_iters=cfg.SOLVER.MAX_ITER - start_iter,
            rank=comm.get_rank(),
            world_size=comm.get_world_size(),
            num_workers=cfg.DATALOADER.NUM_WORKERS,
            min_crop=cfg.INPUT.VIEWS.MIN_CROP,
            cache=cfg.DATALOADER.CACHE,
            cache_gb=cfg.DATALOADER.CACHE_GB,
            **pixel_options(cfg),
        )

    def image_names(self, batch):
        images = self.training_images(self.cfg)
        return [images.path(i) for i in batch["index"].tolist()]

    def extra_state(self):
        return {"recipe": RunIdentity(self.cfg, self.num_images), "spikes": self._spikes}

    def scalar_watchers(self):
        return [self._spikes]

    def step_hooks(self):
        cfg = self.cfg
        return [
            UnreadableImagesCheck(self._unreadable, cfg.SOLVER.IMS_PER_BATCH, cfg.LOG_PERIOD),
            AverageRunningStatistics(
                self.model, cfg.SOLVER.CHECKPOINT_PERIOD, cfg.TEST.EVAL_PERIOD
            ),
        ]

    def resume_or_load(self, resume: bool = True):
        """Go on from the last checkpoint of OUTPUT_DIR; without one, start from MODEL.WEIGHTS."""
        if resume and self.checkpointer.has_checkpoint():
            super().resume_or_load(resume=True)
        elif self.cfg.MODEL.WEIGHTS:
            logger.info(self.load_weights_(self.cfg, self.model, self.cfg.MODEL.WEIGHTS, False))

    def train(self):
        loader = self.build_train_loader(self.cfg, self.start_iter)
        self.data_loader = self.batches(loader)
        return super().train()

    def batches(self, loader: PretrainLoader) -> Iterator[dict]:
        """What the loader yields, as it is trained on."""
        for batch in loader:
            self._unreadable.update(batch.pop("unreadable"))
            yield batch

    @classmethod
    def eval_only(cls, cfg: CfgNode, resume: bool = False) -> dict:
        """Evaluate MODEL.WEIGHTS, or a random network when that is empty.

        Args:
            resume: evaluate the last checkpoint of OUTPUT_DIR, if there is one, instead.
        """
        cfg, _ = cls.effective_config(cfg, comm.get_world_size())
        model = cls.build_model(cfg)
        checkpointer = AtomicCheckpointer(model, cfg.OUTPUT_DIR)
        path = cfg.MODEL.WEIGHTS
        if resume and checkpointer.has_checkpoint():
            path = checkpointer.get_checkpoint_file()
        if path:
            logger.info(cls.load_weights_(cfg, model, path, True))
        return cls.test(cfg, model)
