"""Transfer: detectron2's detectors, trained from weights that load entirely, and evaluated."""

import logging
import os
from collections.abc import Callable, Iterable, Iterator

from detectron2.config import CfgNode
from detectron2.data import build_detection_test_loader
from detectron2.engine import hooks
from detectron2.evaluation import DatasetEvaluator, verify_results
from detectron2.utils import comm
from detectron2.utils.env import seed_all_rng
from fvcore.nn.precise_bn import get_bn_modules
from torch import nn
from torch.optim import Optimizer

from moco_d2.checkpoint import convention_of, load_detector_weights_
from moco_d2.checkpoint.checkpointer import AtomicCheckpointer
from moco_d2.checkpoint.convention import SavedConvention, stated_convention
from moco_d2.checkpoint.loading import read_detector_weights
from moco_d2.data.scale_jitter import scale_jitter_mapper
from moco_d2.data.sem_seg import build_mapper, check_semantic
from moco_d2.data.streams import Stream, generator
from moco_d2.engine import recipe
from moco_d2.engine.backbones import check_heads
from moco_d2.engine.base import BaseTrainer
from moco_d2.engine.densepose import (
    densepose_mapper,
    densepose_test_loader,
    register_densepose,
    uses_densepose,
)
from moco_d2.engine.detection import (
    build_loader,
    check_sampler,
    check_training_sets,
    training_samples,
)
from moco_d2.engine.follow_weights import follow_convention
from moco_d2.engine.hooks import AverageRunningStatistics
from moco_d2.engine.norm import resolve_norms
from moco_d2.engine.precise_bn import PreciseBatches
from moco_d2.engine.scaling import SavedBatch, scale_to_processes
from moco_d2.engine.values import check_detector_values
from moco_d2.errors import UserError
from moco_d2.evaluation.evaluators import EVALUATORS, check_packages, evaluator_type
from moco_d2.solver.detection import build_detector_optimizer, check_detector_solver

logger = logging.getLogger(__name__)

COCO_KEYPOINTS = 17


class TransferTrainer(BaseTrainer):
    """Trains and evaluates any of detectron2's detectors.

    It differs from detectron2's `tools/train_net.py` in that the input convention of
    MODEL.WEIGHTS is applied, that weights fill the backbone entirely or not at all, that SyncBN
    becomes what the hardware can run, that all processes evaluate the same BN statistics, and that
    a run that was stopped and resumed goes on with the images and draws it would have had.
    """

    @classmethod
    def effective_config(cls, cfg: CfgNode, world_size: int) -> tuple[CfgNode, list[str]]:
        """See `BaseTrainer`; adds the weights' input convention, norms and auto-scaling.

        Raises:
            WeightsError: MODEL.WEIGHTS cannot be read, or is no detector and no backbone.
            ValueError: a data set cannot be evaluated, or a random backbone is frozen.
        """
        cfg, notes = super().effective_config(cfg, world_size)
        if uses_densepose(cfg):
            register_densepose()
        check_heads(cfg)
        for name in cfg.DATASETS.TEST:
            evaluator_type(name)
        check_packages((*cfg.DATASETS.TRAIN, *cfg.DATASETS.TEST))
        _check_keypoints(cfg)
        check_semantic(cfg)
        recipe.check_frozen(cfg)
        check_sampler(cfg)
        check_detector_solver(cfg)
        if cfg.SOLVER.ACCUMULATE != 1:
            raise UserError(
                f"SOLVER.ACCUMULATE {cfg.SOLVER.ACCUMULATE} is for pretraining; detectors train "
                "with 1"
            )
        cfg.defrost()
        if cfg.MODEL.WEIGHTS:
            notes += follow_convention(cfg, cls.convention_of_weights(cfg.MODEL.WEIGHTS))
        check_detector_values(cfg)
        cfg, scaling = scale_to_processes(cfg, world_size)
        notes += scaling + resolve_norms(cfg, world_size, cfg.MODEL.DEVICE != "cpu")
        notes += recipe.resolve_seed(cfg)
        cfg.freeze()
        return cfg, notes

    @classmethod
    def convention_of_weights(cls, path: str) -> dict | None:
        return stated_convention(read_detector_weights(path))

    @classmethod
    def describe(cls, cfg: CfgNode, world_size: int, notes: list[str]) -> str:
        rows = recipe.common_rows(cfg, world_size) + recipe.transfer_rows(cfg)
        return recipe.recipe_table(rows, notes)

    def extra_state(self) -> dict:
        """A detector's checkpoints state their input convention, too, and the batch."""
        return {
            "input": SavedConvention(convention_of(self.cfg)),
            "schedule": SavedBatch(self.cfg),
        }

    @classmethod
    def build_model(cls, cfg: CfgNode) -> nn.Module:
        seed_all_rng(cfg.SEED)  # the new layers' weights follow from it, whatever was drawn before
        return super().build_model(cfg)

    @classmethod
    def build_optimizer(cls, cfg: CfgNode, model: nn.Module) -> Optimizer:
        return build_detector_optimizer(cfg, model)

    def step_hooks(self) -> list:
        periods = (self.cfg.SOLVER.CHECKPOINT_PERIOD, self.cfg.TEST.EVAL_PERIOD)
        agree = AverageRunningStatistics(self.model, *periods)
        # Without a norm to measure, detectron2's hook fails.
        if not self.cfg.TEST.PRECISE_BN.ENABLED or not get_bn_modules(self.model):
            return [agree]
        precise = hooks.PreciseBN(
            self.cfg.TEST.EVAL_PERIOD,
            self.model,
            self._precise_bn_batches(),
            self.cfg.TEST.PRECISE_BN.NUM_ITER,
        )
        return [precise, agree]

    def _precise_bn_batches(self) -> Iterator[list[dict]]:
        """Batches for Precise BN; the data set is read when the first one is needed."""
        cfg = self.cfg
        yield from PreciseBatches(
            training_samples(cfg),
            self.build_train_mapper(cfg),
            batch_size=cfg.SOLVER.IMS_PER_BATCH,
            num_iter=cfg.TEST.PRECISE_BN.NUM_ITER,
            seed=cfg.SEED,
        )

    @classmethod
    def build_train_mapper(cls, cfg: CfgNode) -> Callable[[dict], dict]:
        """What turns a sample into the model's input, augmented."""
        check_training_sets(cfg)
        if uses_densepose(cfg):
            return densepose_mapper(cfg)
        if cfg.INPUT.SCALE_JITTER:
            return scale_jitter_mapper(cfg)
        return build_mapper(cfg, is_train=True)

    @classmethod
    def build_train_loader(cls, cfg: CfgNode, start_iter: int = 0) -> Iterable[list[dict]]:
        """Batches from iteration `start_iter` on; see `build_loader`."""
        return build_loader(cfg, cls.build_train_mapper(cfg), start_iter)

    @classmethod
    def build_test_loader(cls, cfg: CfgNode, dataset_name: str) -> Iterable[list[dict]]:
        if uses_densepose(cfg):
            return densepose_test_loader(cfg, dataset_name)
        mapper = build_mapper(cfg, is_train=False)
        return build_detection_test_loader(cfg, dataset_name, mapper=mapper)

    def train(self):
        self.data_loader = self.build_train_loader(self.cfg, self.start_iter)
        return super().train()

    def run_step(self):
        # What the model draws, such as proposals to learn from, is this iteration's own, so that
        # a run that was stopped draws the same.
        draw = generator(Stream.STEP, self.cfg.SEED, self.iter, comm.get_rank())
        seed_all_rng(int(draw.integers(2**31)))
        super().run_step()

    def resume_or_load(self, resume: bool = True) -> None:
        """Resume from the last checkpoint of OUTPUT_DIR, or load MODEL.WEIGHTS entirely.

        Raises:
            WeightsError: MODEL.WEIGHTS does not fill the backbone, or the detector.
        """
        if resume and self.checkpointer.has_checkpoint():
            super().resume_or_load(resume=True)
        elif self.cfg.MODEL.WEIGHTS:
            logger.info(str(load_detector_weights_(self.model, self.cfg.MODEL.WEIGHTS)))
        else:
            logger.info("MODEL.WEIGHTS is empty: all weights are initialised at random.")

    @classmethod
    def eval_only(cls, cfg: CfgNode, resume: bool = False) -> dict:
        """Evaluate a trained detector on DATASETS.TEST.

        Args:
            cfg: MODEL.WEIGHTS names the detector's checkpoint.
            resume: evaluate the last checkpoint of OUTPUT_DIR, if there is one, instead.

        Returns:
            results by task and metric, on the main process.

        Raises:
            WeightsError: there is no checkpoint of this whole detector.
        """
        cfg, _ = cls.effective_config(cfg, comm.get_world_size())
        model = cls.build_model(cfg)
        checkpointer = AtomicCheckpointer(model, cfg.OUTPUT_DIR)
        path = cfg.MODEL.WEIGHTS
        if resume and checkpointer.has_checkpoint():
            path = checkpointer.get_checkpoint_file()
        logger.info(str(load_detector_weights_(model, path, whole=True)))
        results = cls.test(cfg, model)
        if comm.is_main_process():
            verify_results(cfg, results)
        return results

    @classmethod
    def build_evaluator(cls, cfg: CfgNode, dataset_name: str) -> DatasetEvaluator:
        folder = os.path.join(cfg.OUTPUT_DIR, "inference")
        return EVALUATORS[evaluator_type(dataset_name)](cfg, dataset_name, folder)


def _check_keypoints(cfg: CfgNode) -> None:
    keypoints = cfg.MODEL.ROI_KEYPOINT_HEAD.NUM_KEYPOINTS
    sigmas = len(cfg.TEST.KEYPOINT_OKS_SIGMAS) or COCO_KEYPOINTS
    if cfg.MODEL.KEYPOINT_ON and sigmas != keypoints:
        raise UserError(
            f"MODEL.ROI_KEYPOINT_HEAD.NUM_KEYPOINTS is {keypoints}, so TEST.KEYPOINT_OKS_SIGMAS "
            f"needs {keypoints} values, not {sigmas}; empty means COCO's {COCO_KEYPOINTS}"
        )
