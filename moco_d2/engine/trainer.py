"""Pretraining of a MoCo meta-architecture."""

from moco_d2.checkpoint.loading import convention_of_weights, load_pretraining_weights_
from moco_d2.engine import recipe
from moco_d2.engine.distributed import unwrap
from moco_d2.engine.follow_weights import follow_convention
from moco_d2.engine.health import Health
from moco_d2.engine.hooks import KeyEncoderUpdate
from moco_d2.engine.images import ImageTrainer
from moco_d2.engine.mechanism import directions, resolve_bank_size
from moco_d2.engine.monitors import Monitors
from moco_d2.evaluation.features import evaluate_knn, knn_sets


class PretrainTrainer(ImageTrainer):
    """Pretrains a MoCo meta-architecture. Evaluation is kNN classification of its features."""

    @classmethod
    def check(cls, cfg, images, world_size):
        if cfg.DATASETS.TEST:
            knn_sets(cfg)
        warnings = recipe.check_pretraining(cfg, len(images), world_size)
        notes = resolve_bank_size(cfg, len(images))
        if cfg.MODEL.WEIGHTS:
            notes += follow_convention(cfg, cls.convention_of_weights(cfg.MODEL.WEIGHTS))
        return [*notes, *(f"WARNING: {warning}" for warning in warnings)]

    @classmethod
    def convention_of_weights(cls, path):
        return convention_of_weights(path)

    @classmethod
    def recipe_rows(cls, cfg, images):
        return recipe.pretrain_rows(cfg, len(images))

    @classmethod
    def view_recipes(cls, cfg):
        return cfg.INPUT.VIEWS.QUERY, cfg.INPUT.VIEWS.KEY

    @classmethod
    def load_weights_(cls, cfg, model, path, whole):
        """A MoCo checkpoint fills all of the model, any known backbone's weights both encoders."""
        return str(load_pretraining_weights_(model, path))

    def step_hooks(self):
        moco = self.cfg.MODEL.MOCO
        update = KeyEncoderUpdate(self.model, moco.MOMENTUM, moco.MOMENTUM_SCHEDULE)
        self._monitors = Monitors(
            unwrap(self.model),
            keys_per_step=self.cfg.SOLVER.IMS_PER_BATCH * directions(self.cfg),
            period=self.cfg.MONITORS.PERIOD,
            picture_period=self.cfg.MONITORS.PICTURE_PERIOD,
            order=self.cfg.INPUT.FORMAT,
        )
        return [update, self._monitors, *super().step_hooks()]

    def batches(self, loader):
        return self._monitors.see(super().batches(loader))

    def extra_state(self):
        self._health = Health(self.cfg, self.num_images, self.alarms)
        return {**super().extra_state(), "health": self._health}

    def scalar_watchers(self):
        return [*super().scalar_watchers(), self._health]

    @classmethod
    def test(cls, cfg, model, evaluators=None):
        """kNN accuracy on DATASETS.TEST; see :func:`moco_d2.evaluation.features.evaluate_knn`."""
        return evaluate_knn(cfg, unwrap(model))
