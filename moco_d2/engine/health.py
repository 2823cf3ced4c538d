"""Patterns of trouble in what a pretraining run logs, and the alarms for them.

docs/monitoring.md says why each threshold is where it is.
"""

import math
from statistics import median

from detectron2.config import CfgNode
from detectron2.utils import comm
from detectron2.utils.events import EventStorage

from moco_d2.engine.alarms import Alarms
from moco_d2.engine.mechanism import directions, leaks

_LOSS = "loss_over_chance"
_ACCURACY = "[metric]contrastive_acc1"
_STD = "[metric]feature_std"
_RANK = "[metric]effective_rank"
_KNN = "knn/top1"

_AT_CHANCE = 0.98  # of the chance level
_SOLVED = 95.0  # percent, contrastive accuracy
_FALLEN = 0.9  # of the best kNN accuracy
_COLLAPSED_STD = 0.1  # 1: isotropic
_COLLAPSED_RANK = 2.0
_LIVES = 1.0  # time constants of the key encoder in the life of the queue
_START_LEFT = 0.05  # weight of the start in the final key encoder


class Health:
    """Judges what is logged, iteration by iteration, and logs the loss relative to chance.

    Nothing but logged values and the config enters, so that every process judges alike. The first
    iterations are not judged: until the warm-up is over and a queue has turned over twice, or a
    memory bank has been written twice.
    """

    window = 100  # iterations whose median is judged
    looks = 3  # of the monitors, all of which must be bad

    def __init__(self, cfg: CfgNode, num_images: int, alarms: Alarms):
        """
        Args:
            cfg: effective.
            num_images: size of the data set.
        """
        moco, batch = cfg.MODEL.MOCO, cfg.SOLVER.IMS_PER_BATCH
        self._alarms = alarms
        self._moco, self._iterations = moco, cfg.SOLVER.MAX_ITER
        self._is_v3 = cfg.MODEL.META_ARCHITECTURE == "MoCoV3"
        kind = "in_batch" if self._is_v3 else moco.DICTIONARY
        self._follows = self._is_v3 or kind == "queue"
        self._can_leak = kind != "memory_bank"
        self._leaks = [] if self._is_v3 or not self._can_leak else leaks(cfg)
        # What says how many negatives there are.
        in_batch = kind == "in_batch"
        self._negatives = "SOLVER.IMS_PER_BATCH" if in_batch else "MODEL.MOCO.QUEUE_SIZE"
        # Steps that a key stays in the dictionary, and when that was judged from, in words.
        self._life, self._settled = {
            "queue": (
                moco.QUEUE_SIZE / (batch * directions(cfg)),
                "the queue has turned over twice",
            ),
            "memory_bank": (num_images / batch, "each image has been seen twice"),
            "in_batch": (0.0, "the warm-up is over"),
        }[kind]
        self.first = max(math.ceil(2 * self._life), cfg.SOLVER.WARMUP_ITERS)
        self._recent: dict[str, list[float]] = {n: [] for n in (_LOSS, _ACCURACY, _STD, _RANK)}
        # Top-1 accuracies: the best, how many of the last were below, and when the last was.
        self._knn = {"best": 0.0, "latest": 0.0, "fallen": 0, "iteration": -1}

    def update(self, written: dict[str, list[tuple[int, float]]], storage: EventStorage) -> None:
        """Judge values in order of iterations.

        Args:
            written: what `ScalarBuffer.flush` returned, the same on every process.
        """
        self._judge_momentum()
        self._read_knn(storage)
        values: dict[int, dict[str, float]] = {}
        for name, pairs in written.items():
            for iteration, value in pairs:
                values.setdefault(iteration, {})[name] = value
        for iteration, logged in sorted(values.items()):
            if "total_loss" in logged and "[metric]chance_level" in logged:
                logged[_LOSS] = logged["total_loss"] / logged["[metric]chance_level"]
                if comm.is_main_process():
                    storage.put_scalar(_LOSS, logged[_LOSS], cur_iter=iteration)
            if iteration >= self.first:
                for name in self._recent:
                    self._keep(name, logged.get(name))
                self._judge(iteration)

    def _keep(self, name: str, value: float | None) -> None:
        if value is not None and math.isfinite(value):
            length = self.looks if name in (_STD, _RANK) else self.window
            self._recent[name] = [*self._recent[name], value][-length:]

    def _read_knn(self, storage: EventStorage) -> None:
        """Take in the kNN accuracies that have come since; of several test sets the first's."""
        names = (name for name in storage.histories() if name.endswith(_KNN))
        name = next(names, None)
        if name is None:
            return
        knn = self._knn
        for value, iteration in storage.history(name).values():
            if iteration > knn["iteration"]:
                knn["best"] = max(knn["best"], value)
                fallen = value < _FALLEN * knn["best"]
                knn.update(
                    latest=value,
                    iteration=int(iteration),
                    fallen=knn["fallen"] + 1 if fallen else 0,
                )

    def _judge(self, iteration: int) -> None:
        if len(self._recent[_ACCURACY]) == self.window:
            self._judge_leak(median(self._recent[_ACCURACY]))
        if len(self._recent[_LOSS]) == self.window:
            self._judge_loss(median(self._recent[_LOSS]), iteration)
        if len(self._recent[_STD]) == self.looks:
            self._judge_spread(max(self._recent[_STD]), max(self._recent[_RANK]))

    def _judge_leak(self, accuracy: float) -> None:
        knn = self._knn
        if accuracy < _SOLVED or not self._can_leak:
            return
        seen = f"contrastive accuracy is {accuracy:.1f} %"
        if self._leaks:
            self._alarms.sound(
                "bn_leak",
                f"{seen}, and {self._leaks[0]}. Set MODEL.MOCO.SHUFFLE_BN True and "
                "MODEL.BN_GROUP_SIZE to less than the batch",
            )
        elif knn["fallen"] >= 2:
            self._alarms.sound(
                "bn_leak",
                f"{seen} while kNN accuracy has fallen from {knn['best']:.1f} to "
                f"{knn['latest']:.1f} %: the loss is solved by something else than what is in the "
                f"images. Use stronger views or a larger {self._negatives}"
                f"{'' if self._is_v3 else ', or a smaller MODEL.BN_GROUP_SIZE'}",
            )

    def _judge_loss(self, ratio: float, iteration: int) -> None:
        if ratio < _AT_CHANCE:
            return
        self._alarms.sound(
            "stuck_at_chance",
            f"the loss is {ratio:.3f} of that of a guess at iteration {iteration}, and "
            f"{self._settled}: nothing is learned. Lower SOLVER.BASE_LR, look at pairs of views "
            "(do both show the same thing?), or, if images are few or alike, "
            f"lower {self._negatives}",
        )

    def _judge_spread(self, std: float, rank: float) -> None:
        if std >= _COLLAPSED_STD and rank >= _COLLAPSED_RANK:
            return
        self._alarms.sound(
            "collapse",
            f"the features of all images are nearly the same (standard deviation {std:.3f} of that "
            f"of isotropic features, effective rank {rank:.1f}). Look at the images and views, "
            "lower SOLVER.BASE_LR, and do not start from a collapsed checkpoint",
        )

    def _judge_momentum(self) -> None:
        if not self._follows:
            return
        moco = self._moco
        moved = 1 - moco.MOMENTUM  # per step
        if self._life * moved > _LIVES:
            self._alarms.sound(
                "momentum_too_fast",
                f"a key stays in the queue for {self._life:.0f} steps, in which the key encoder "
                f"(MODEL.MOCO.MOMENTUM {moco.MOMENTUM:g}) becomes another one "
                f"{self._life * moved:.1f} times: old keys cannot be compared with new ones. Raise "
                f"it to {1 - 1 / self._life:.4g} or more, or lower MODEL.MOCO.QUEUE_SIZE",
            )
        if moco.MOMENTUM_SCHEDULE == "cosine":
            moved /= 2  # the mean over the run
        left = math.exp(-self._iterations * moved)
        if left > _START_LEFT:
            self._alarms.sound(
                "momentum_too_slow",
                f"after {self._iterations} iterations the key encoder (MODEL.MOCO.MOMENTUM "
                f"{moco.MOMENTUM:g}) still is its start to {100 * left:.0f} %, and keys are those "
                f"of an encoder that has hardly learned. Lower it, or train longer",
            )

    def state_dict(self) -> dict:
        return {"recent": self._recent, "knn": self._knn}

    def load_state_dict(self, saved: dict) -> None:
        self._recent, self._knn = saved["recent"], saved["knn"]
