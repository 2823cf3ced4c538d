"""Training with class labels: supervised pretraining, and linear classification as published."""

from collections.abc import Mapping, Sequence

from detectron2.config import CfgNode

from moco_d2.checkpoint.files import read_weight_file
from moco_d2.checkpoint.loading import load_classifier_weights_
from moco_d2.checkpoint.reading import read_backbone
from moco_d2.data.labels import load_labelled_index, with_classes
from moco_d2.engine import recipe
from moco_d2.engine.backbones import has_batch_norm
from moco_d2.engine.distributed import unwrap
from moco_d2.engine.follow_weights import follow_convention
from moco_d2.engine.frozen import FrozenTensors
from moco_d2.engine.images import ImageTrainer, training_images
from moco_d2.errors import UserError
from moco_d2.evaluation.classification import evaluate_classification
from moco_d2.evaluation.features import evaluate_knn, knn_sets


class SavedClasses:
    """Puts the names of the classes, in the order of the logits, into checkpoints, and refuses
    those of other classes."""

    def __init__(self, names: Sequence[str]):
        self._names = list(names)

    def state_dict(self) -> dict:
        return {"names": self._names}

    def load_state_dict(self, saved: Mapping) -> None:
        if saved.get("names", self._names) != self._names:
            raise UserError(
                f"the checkpoint tells {len(saved['names'])} classes apart that are not the "
                f"{len(self._names)} classes of DATASETS.TRAIN, or not in their order; name the "
                "data set that it was trained on"
            )


class ClassificationTrainer(ImageTrainer):
    """Trains an ImageClassifier. Evaluation is top-1 and top-5 accuracy, and with TEST.KNN.BANK
    kNN classification of its features."""

    @classmethod
    def training_images(cls, cfg):
        names = tuple(cfg.DATASETS.TRAIN)
        return training_images(names, True, cfg.DATASETS.FEW_LABELS, cfg.SEED)

    @classmethod
    def convention_of_weights(cls, path):
        return read_backbone(path).convention

    @classmethod
    def check(cls, cfg, images, world_size):
        notes = check_classifier(cfg, images.classes, world_size)
        for name in cfg.DATASETS.TEST:
            test = load_labelled_index([name], "DATASETS.TEST")
            with_classes(test, images.classes, name)
        if cfg.TEST.KNN.BANK:
            knn_sets(cfg)
        if cfg.MODEL.WEIGHTS:
            notes += follow_convention(cfg, cls.convention_of_weights(cfg.MODEL.WEIGHTS))
        return notes

    @classmethod
    def recipe_rows(cls, cfg, images):
        return classifier_rows(cfg)

    @classmethod
    def view_recipes(cls, cfg):
        return (cfg.INPUT.VIEWS.QUERY,)

    @classmethod
    def load_weights_(cls, cfg, model, path, whole):
        """Training begins with a backbone from any known file and a new head."""
        if whole:
            saved = read_weight_file(path).section("classes")
            SavedClasses(cls.training_images(cfg).classes).load_state_dict(saved)
        return str(load_classifier_weights_(model, path, whole=whole))

    def extra_state(self):
        classes = self.training_images(self.cfg).classes
        return {**super().extra_state(), "classes": SavedClasses(classes)}

    def step_hooks(self):
        steps = super().step_hooks()
        if not self.cfg.MODEL.CLASSIFIER.FREEZE_BACKBONE:
            return steps
        periods = (self.cfg.SOLVER.CHECKPOINT_PERIOD, self.cfg.TEST.EVAL_PERIOD)
        self._frozen = FrozenTensors(unwrap(self.model).encoder.backbone, *periods)
        return [self._frozen, *steps]

    def resume_or_load(self, resume: bool = True):
        if not self.cfg.MODEL.CLASSIFIER.FREEZE_BACKBONE:
            super().resume_or_load(resume)
            return
        # What the run began with, also when it goes on from a checkpoint.
        super().resume_or_load(resume=False)
        self._frozen.remember()
        if resume and self.checkpointer.has_checkpoint():
            super().resume_or_load(resume=True)
            self._frozen.check("in the checkpoint")

    @classmethod
    def test(cls, cfg, model, evaluators=None):
        """Accuracies by task and metric, by data set when there are several. A collective."""
        model = unwrap(model)
        results = evaluate_classification(cfg, model, cls.training_images(cfg).classes)
        knn = evaluate_knn(cfg, model) if cfg.TEST.KNN.BANK else {}
        if len(results) == 1:
            return {**next(iter(results.values())), **knn}
        return {name: {**result, **knn.get(name, {})} for name, result in results.items()}


def check_classifier(cfg: CfgNode, classes: Sequence[str], world_size: int) -> list[str]:
    """Refuse a config of ImageClassifier that cannot run or cannot learn; set NUM_CLASSES.

    Args:
        cfg: not frozen.
        classes: names of the data set's classes.
        world_size: number of processes.

    Returns:
        a note per automatic choice.

    Raises:
        UserError: one sentence with the value and what to set instead.
    """
    classifier, notes = cfg.MODEL.CLASSIFIER, []
    if len(classes) < 2:
        raise UserError(
            f"DATASETS.TRAIN has images of {len(classes)} class: there is nothing to tell apart; "
            "classes are folders, labels in a list, or a registered set's 'label'"
        )
    if not classifier.NUM_CLASSES:
        classifier.NUM_CLASSES = len(classes)
        notes.append(f"MODEL.CLASSIFIER.NUM_CLASSES -> {len(classes)}, those of DATASETS.TRAIN")
    if len(classes) != classifier.NUM_CLASSES:
        raise UserError(
            f"MODEL.CLASSIFIER.NUM_CLASSES is {classifier.NUM_CLASSES} and DATASETS.TRAIN has "
            f"{len(classes)} classes; set it to 0 to take those"
        )
    if not 0.0 <= classifier.LABEL_SMOOTHING < 1.0:
        raise UserError(
            f"MODEL.CLASSIFIER.LABEL_SMOOTHING is {classifier.LABEL_SMOOTHING:g}; it must lie in "
            "[0, 1)"
        )
    if not classifier.FREEZE_BACKBONE:
        recipe.check_groups(cfg, world_size)
        recipe.check_frozen(cfg)
        return notes
    share, parts = recipe.check_share(cfg, world_size), cfg.SOLVER.ACCUMULATE
    if parts < 1 or share % parts:
        raise UserError(
            f"SOLVER.ACCUMULATE {parts} does not divide {share} images per process; give one of "
            f"{[p for p in range(1, share + 1) if share % p == 0]}"
        )
    if not cfg.MODEL.WEIGHTS and not classifier.RANDOM_BACKBONE:
        raise UserError(
            "MODEL.CLASSIFIER.FREEZE_BACKBONE without MODEL.WEIGHTS measures random features; name "
            "the weights, or set MODEL.CLASSIFIER.RANDOM_BACKBONE True if that is what you want"
        )
    return notes


def classifier_rows(cfg: CfgNode) -> list[tuple[str, str]]:
    """What the table says of a classifier besides."""
    classifier, views, few = cfg.MODEL.CLASSIFIER, cfg.INPUT.VIEWS, cfg.DATASETS.FEW_LABELS
    batch, trained = cfg.SOLVER.IMS_PER_BATCH, "everything"
    group = cfg.MODEL.BN_GROUP_SIZE or batch
    if classifier.FREEZE_BACKBONE:
        trained = "the last layer; the backbone is frozen, in eval mode"
    elif has_batch_norm(cfg):
        trained += f", BN in {batch // group} groups of {group} images"
    kept = f"{few * 100:g} % of each class" if few < 1 else f"{few:g} images of each class"
    return [
        ("test", ", ".join(cfg.DATASETS.TEST)),
        ("views", f"{views.SIZE} px, {views.QUERY}"),
        ("classes", str(classifier.NUM_CLASSES)),
        ("labels", kept if few else "all"),
        ("loss", f"cross-entropy, label smoothing {classifier.LABEL_SMOOTHING:g}"),
        ("trained", trained),
    ]
