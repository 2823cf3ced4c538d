"""What every run of this project shares, whatever is trained."""

import logging
import weakref

from detectron2.config import CfgNode
from detectron2.engine import DefaultTrainer, TrainerBase, hooks
from detectron2.utils import comm
from detectron2.utils.events import CommonMetricPrinter, JSONWriter, TensorboardXWriter
from detectron2.utils.file_io import PathManager
from detectron2.utils.logger import setup_logger

from moco_d2.checkpoint.checkpointer import AtomicCheckpointer
from moco_d2.engine import recipe
from moco_d2.engine.agreement import not_finite
from moco_d2.engine.alarms import Alarms
from moco_d2.engine.backbones import check_architecture
from moco_d2.engine.distributed import create_ddp_model
from moco_d2.engine.history import ScalarHistory, forget_metrics
from moco_d2.engine.hooks import Checkpoints, Evaluation, ScalarWriter
from moco_d2.engine.scalars import ScalarBuffer
from moco_d2.engine.signals import saved_on_signal
from moco_d2.engine.step import PRECISIONS, NotFinite, Step
from moco_d2.engine.throughput import Throughput
from moco_d2.engine.values import check_values
from moco_d2.errors import UserError


class BaseTrainer(DefaultTrainer):
    """detectron2's DefaultTrainer, run on any number of CPU or GPU processes.

    It differs in: DDP on CPU, every process starting from the same parameters and buffers,
    checkpoints that are complete or not there, metrics read from the device every LOG_PERIOD
    iterations only, and mixed precision on CPU.
    """

    def __init__(self, cfg: CfgNode):
        TrainerBase.__init__(self)  # DefaultTrainer's own __init__ is what this one replaces
        if not logging.getLogger("detectron2").isEnabledFor(logging.INFO):
            setup_logger()
        cfg, _ = self.effective_config(cfg, comm.get_world_size())
        self.cfg = cfg
        self.scalars = ScalarBuffer()
        self.alarms = Alarms()
        model = self.build_model(cfg)
        optimizer = self.build_optimizer(cfg, model)
        amp = cfg.SOLVER.AMP
        self._trainer = Step(
            create_ddp_model(model),
            optimizer,
            self.scalars,
            PRECISIONS[amp.PRECISION] if amp.ENABLED else None,
            cfg.SOLVER.ACCUMULATE,
        )
        self.scheduler = self.build_lr_scheduler(cfg, optimizer)
        self._history = ScalarHistory(weakref.proxy(self), cfg.LOG_PERIOD)
        self.checkpointer = AtomicCheckpointer(
            model,
            cfg.OUTPUT_DIR,
            keep=cfg.SOLVER.CHECKPOINT_KEEP,
            archive_period=cfg.SOLVER.CHECKPOINT_ARCHIVE_PERIOD,
            trainer=weakref.proxy(self),
            metrics=self._history,
            alarms=self.alarms,
            **self.extra_state(),
        )
        self.start_iter = 0
        self.max_iter = cfg.SOLVER.MAX_ITER
        self.register_hooks(self.build_hooks())

    @classmethod
    def effective_config(cls, cfg: CfgNode, world_size: int) -> tuple[CfgNode, list[str]]:
        """The config that really runs on this hardware, and a note per automatic choice.

        Applied to its own result it changes nothing.

        Raises:
            UserError, OSError: one sentence on what cannot run and what to do.
        """
        cfg = cfg.clone()
        cfg.defrost()
        check_values(cfg)
        recipe.check_checkpoints(cfg)
        check_architecture(cfg)
        notes = recipe.resolve_device(cfg)
        amp = cfg.SOLVER.AMP
        if amp.ENABLED and amp.PRECISION not in PRECISIONS:
            raise UserError(
                f"SOLVER.AMP.PRECISION is {amp.PRECISION!r}; known: {', '.join(sorted(PRECISIONS))}"
            )
        if amp.ENABLED and amp.PRECISION == "float16" and cfg.MODEL.DEVICE == "cpu":
            amp.PRECISION = "bfloat16"
            notes.append("SOLVER.AMP.PRECISION float16 -> bfloat16: a CPU has no float16 training")
        cfg.freeze()
        return cfg, notes

    @classmethod
    def convention_of_weights(cls, path: str) -> dict | None:
        """The input convention that configs take over from a weight file; None: they do not.

        Raises:
            WeightsError: the file cannot be read, or is of no use here.
        """
        return None

    @classmethod
    def describe(cls, cfg: CfgNode, world_size: int, notes: list[str]) -> str:
        """The effective recipe as a table; `cfg` and `notes` are :meth:`effective_config`'s."""
        return recipe.recipe_table(recipe.common_rows(cfg, world_size), notes)

    def extra_state(self) -> dict:
        """Further objects with `state_dict` that checkpoints hold, by name."""
        return {}

    @property
    def stop_signal(self) -> int:
        """The signal on which all processes end after this step; 0: none."""
        return self._trainer.agreement.stop_signal

    def resume_or_load(self, resume: bool = True):
        super().resume_or_load(resume)
        if comm.is_main_process():
            written = self._history.written(self.start_iter - 1) if self.start_iter else None
            forget_metrics(f"{self.cfg.OUTPUT_DIR}/metrics.json", after=written)

    def train(self):
        if self.data_loader is None:
            self.data_loader = self.build_train_loader(self.cfg)
        with self.scalars, saved_on_signal():
            return super().train()

    def before_train(self):
        super().before_train()
        if self.start_iter > 0:
            # The run that saved had not yet evaluated and written that iteration, or no one knows.
            self.iter = self.storage.iter = self.start_iter - 1
            if comm.is_main_process():
                self._history.restore(self.storage)
            for hook in self._after_checkpoint:
                hook.after_step()

    def run_step(self):
        self._trainer.iter = self.iter
        try:
            self._trainer.run_step()
        except NotFinite as stop:
            raise not_finite(
                self.iter,
                self._trainer.agreement.losses,
                self.image_names(stop.batch),
                self.cfg.OUTPUT_DIR,
                self.checkpointer,
            ) from None

    def image_names(self, batch) -> list[str]:
        """Files of the images of a batch."""
        return [image["file_name"] for image in batch]

    def build_hooks(self):
        """Timer and lr, this project's hooks, then checkpoints, evaluation and writers."""
        cfg = self.cfg
        periods = (cfg.LOG_PERIOD, cfg.SOLVER.CHECKPOINT_PERIOD)
        result = [
            hooks.IterationTimer(),
            hooks.LRScheduler(),
            *self.step_hooks(),
            ScalarWriter(self.scalars, *periods, watchers=self.scalar_watchers()),
            Checkpoints(self.checkpointer, cfg.SOLVER.CHECKPOINT_PERIOD),
        ]
        if comm.is_main_process():
            result.append(
                Throughput(
                    cfg.SOLVER.IMS_PER_BATCH // comm.get_world_size(),
                    cfg.LOG_PERIOD,
                    cfg.DATALOADER.NUM_WORKERS,
                    comm.get_local_size(),
                    self.alarms,
                )
            )
        self._after_checkpoint = [Evaluation(cfg.TEST.EVAL_PERIOD, self._evaluate)]
        if comm.is_main_process():
            self._after_checkpoint.append(
                hooks.PeriodicWriter(self.build_writers(), period=cfg.LOG_PERIOD)
            )
        return result + self._after_checkpoint

    def step_hooks(self) -> list:
        """Hooks that run after each step, before it is checkpointed."""
        return []

    def scalar_watchers(self) -> list:
        """Who is told of all scalars that are logged; see :class:`ScalarWriter`."""
        return []

    def _evaluate(self):
        self._last_eval_results = self.test(self.cfg, self.model)
        return self._last_eval_results

    def build_writers(self):
        window, output = self.cfg.LOG_PERIOD, self.cfg.OUTPUT_DIR
        PathManager.mkdirs(output)
        return [
            CommonMetricPrinter(self.max_iter, window_size=window),
            JSONWriter(f"{output}/metrics.json", window_size=window),
            TensorboardXWriter(output, window_size=window),
        ]
