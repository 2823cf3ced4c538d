"""The plan of a transfer benchmark: tasks x initialisations x trials, as cells."""

import re
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from detectron2.config import CfgNode, get_cfg
from detectron2.data import MetadataCatalog

from moco_d2.checkpoint.files import sha256
from moco_d2.config import add_moco_config
from moco_d2.engine.configs import flattened
from moco_d2.engine.setup import sentence, setup, trainer_of
from moco_d2.engine.transfer import TransferTrainer
from moco_d2.errors import UserError
from moco_d2.transfer.cells import REPOSITORY, Cell, training_step
from moco_d2.transfer.published import published_results

CONFIGS = REPOSITORY / "configs/transfer"
RANDOM, SUPERVISED, PRETRAINED = "random", "supervised", "pretrained"
# What every cell sets itself.
OWN_KEYS = ("MODEL.WEIGHTS", "SEED", "OUTPUT_DIR", "DATASETS.FEW_LABELS")
_NAME = re.compile(r"[A-Za-z0-9][\w.+-]*")

# `evaluator_type` -> what its results are called; the first is the one to look at first.
_SEMANTIC = ("sem_seg/mIoU",)
METRICS: dict[str, tuple[str, ...]] = {
    "pascal_voc": ("bbox/AP", "bbox/AP50", "bbox/AP75"),
    "sem_seg": (*_SEMANTIC, "sem_seg/fwIoU", "sem_seg/mACC", "sem_seg/pACC"),
    "cityscapes_instance": ("segm/AP", "segm/AP50"),
    "cityscapes_sem_seg": (*_SEMANTIC, "sem_seg/IoU_sup"),
}


@dataclass(frozen=True)
class Init:
    """An initialisation: a name, and a file of weights or "" for random ones."""

    name: str
    weights: str = ""
    sha256: str = ""

    @property
    def kind(self) -> str:
        if not self.weights:
            return RANDOM
        return SUPERVISED if self.name.startswith(SUPERVISED) else PRETRAINED


@dataclass(frozen=True)
class Task:
    """A config to train and evaluate from every initialisation."""

    name: str
    config: Path

    @property
    def protocol(self) -> str:
        """What the published numbers of this task belong to, or else the config's first lines."""
        published = published_results().tasks.get(self.name)
        if published is not None:
            return published.protocol
        lines = self.config.read_text().splitlines()
        head = [line.removeprefix("#").strip() for line in lines if line.startswith("#")]
        return " ".join(head).partition(". ")[0].rstrip(".")


@dataclass
class Plan:
    """What a benchmark is going to do.

    Attributes:
        problems: sentences on why it cannot; none: it can.
        configs: effective config by task and init, where there is one.
    """

    root: Path
    tasks: list[Task]
    inits: list[Init]
    trials: int
    num_gpus: int
    options: list[str]
    few_labels: float = 0.0
    problems: list[str] = field(default_factory=list)
    configs: dict[tuple[str, str], CfgNode] = field(default_factory=dict)
    cells: list[Cell] = field(default_factory=list)

    @property
    def on_gpu(self) -> bool:
        """Whether any run needs a GPU."""
        return any(cfg.MODEL.DEVICE != "cpu" for cfg in self.configs.values() if cfg is not None)

    def config(self, task: Task) -> CfgNode | None:
        """The config of a task from the first initialisation that it can start from."""
        found = (self.configs.get((task.name, init.name)) for init in self.inits)
        return next((cfg for cfg in found if cfg is not None), None)


def make_plan(
    root: str,
    tasks: Sequence[str],
    inits: Sequence[str],
    trials: int,
    num_gpus: int = 1,
    options: Sequence[str] = (),
    few_labels: float = 0.0,
) -> Plan:
    """Resolve names and settings; what cannot run is listed in `problems`, nothing is raised.

    Args:
        root: folder of the benchmark.
        tasks: names of files in configs/transfer, or paths of configs.
        inits: "NAME=FILE", or "random".
        trials: per task and initialisation; trial k has seed k.
        num_gpus: GPUs of a run, or processes on a CPU.
        options: KEY VALUE pairs of all runs.
        few_labels: DATASETS.FEW_LABELS of all runs.
    """
    problems: list[str] = []
    plan = Plan(
        Path(root).resolve(),
        [task for name in tasks if (task := _task(name, problems))],
        [init for text in inits if (init := _init(text, problems))],
        trials,
        num_gpus,
        list(options),
        few_labels,
        problems,
    )
    _check_names(plan)
    problems += unusable_arguments("--trials", trials, num_gpus, options)
    if set(options[0::2]) & set(OWN_KEYS):
        problems.append(f"{', '.join(OWN_KEYS)} are each run's own: leave them out of KEY VALUE")
    has_configs = num_gpus > 0 and len(options) % 2 == 0
    for task in plan.tasks if has_configs else ():
        for init in plan.inits:
            plan.configs[task.name, init.name] = cfg = _config(plan, task, init)
            if cfg is not None:
                plan.cells += [_cell(plan, task, init, cfg, k + 1) for k in range(trials)]
    plan.cells.sort(key=lambda cell: cell.trial)  # a first result of everything, early
    return plan


def unusable_arguments(name: str, trials: int, num_gpus: int, options: Sequence[str]) -> list[str]:
    """Sentences on what of a command line no run can have.

    Args:
        name: of the option that says how many trials.
        options: KEY VALUE pairs.
    """
    problems = [
        f"{option} is {number}; it must be at least 1"
        for option, number in ((name, trials), ("--num-gpus", num_gpus))
        if number < 1
    ]
    if len(options) % 2:
        problems.append(f"{' '.join(options)!r} are no pairs of KEY VALUE: one has no value")
    return problems


def describe(plan: Plan) -> dict[str, Any]:
    """`tasks`, `inits` and `trials` of results.json."""
    return {
        "trials": plan.trials,
        "tasks": [
            {
                "name": task.name,
                "config": str(task.config),
                "protocol": "; ".join(filter(None, (task.protocol, few_words(plan.few_labels)))),
                "metric": metrics[0],
                "metrics": metrics,
            }
            for task in plan.tasks
            if (metrics := task_metrics(task, plan.config(task)))
        ],
        "inits": [
            {"name": i.name, "weights": i.weights, "sha256": i.sha256, "kind": i.kind}
            for i in plan.inits
        ],
    }


def task_metrics(task: Task, cfg: CfgNode) -> list[str]:
    """Names of what a task is judged by, as in metrics.json, the first to look at first."""
    found: list[str] = []
    for name in cfg.DATASETS.TEST:
        prefix = f"{name}/" if len(cfg.DATASETS.TEST) > 1 else ""
        kind = MetadataCatalog.get(name).get("evaluator_type")
        found += [prefix + metric for metric in METRICS.get(kind) or _of_objects(cfg)]
    published = published_results().tasks.get(task.name)
    first = published.values[0].metric if published and published.values else None
    return sorted(found, key=lambda metric: metric != first)


def _of_objects(cfg: CfgNode) -> list[str]:
    kinds = ["densepose_gps"] * bool(cfg.MODEL.get("DENSEPOSE_ON")) + ["bbox"]
    kinds += ["segm"] * cfg.MODEL.MASK_ON
    kinds = ["keypoints"] * cfg.MODEL.KEYPOINT_ON + kinds
    return [f"{kind}/{score}" for kind in kinds for score in ("AP", "AP50", "AP75")]


def few_words(few_labels: float) -> str:
    """What few labels mean, in words; "": all images are used."""
    if not few_labels:
        return ""
    return f"{few_labels:g} of the images" if few_labels < 1 else f"{few_labels:g} images"


def _task(name: str, problems: list[str]) -> Task | None:
    for path in (Path(name), CONFIGS / f"{name}.yaml"):
        if path.is_file():
            return Task(path.stem, path.resolve())
    known = sorted(p.stem for p in CONFIGS.glob("*.yaml") if not p.stem.startswith("Base-"))
    problems.append(f"there is no task {name!r}: give the path of a config, or {', '.join(known)}")
    return None


def _init(text: str, problems: list[str]) -> Init | None:
    name, _, weights = text.partition("=")
    if not _NAME.fullmatch(name):
        problems.append(
            f"--init {text!r}: a name is of letters, digits and ._+-, and is followed by =FILE"
        )
    elif (name == RANDOM) == bool(weights):
        problems.append(
            f"--init {text!r}: {RANDOM!r} has no file, and every other name has one: NAME=FILE"
        )
    elif weights and not Path(weights).is_file():
        problems.append(f"--init {text!r}: there is no weight file {weights}")
    else:
        path = str(Path(weights).resolve()) if weights else ""
        return Init(name, path, sha256(path) if path else "")
    return None


def _check_names(plan: Plan) -> None:
    for option, names in (
        ("--tasks", [task.name for task in plan.tasks]),
        ("--init", [init.name for init in plan.inits]),
    ):
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            plan.problems.append(f"{option} has {', '.join(twice)} more than once")


def _config(plan: Plan, task: Task, init: Init) -> CfgNode | None:
    """The effective config of a run. See `moco_d2.transfer.checks` for what else can be wrong."""
    options = _options(plan, init, trial=1)
    args = Namespace(config_file=str(task.config), opts=options, eval_only=False, resume=False)
    try:
        cfg, _ = setup(args, plan.num_gpus)
    except (ValueError, KeyError, AssertionError, OSError, ImportError) as error:
        plan.problems.append(f"{task.name} from {init.name}: {sentence(error)}")
        return None
    if trainer_of(cfg) is not TransferTrainer:
        plan.problems.append(
            f"{task.config} trains a {cfg.MODEL.META_ARCHITECTURE}, which is no transfer task; "
            "name the config of a detector or of a semantic segmentor"
        )
        return None
    return cfg


def _options(plan: Plan, init: Init, trial: int) -> list[str]:
    few = ["DATASETS.FEW_LABELS", str(float(plan.few_labels))] if plan.few_labels else []
    own = ["MODEL.WEIGHTS", init.weights, "SEED", str(trial)]
    return ["SOLVER.CHECKPOINT_KEEP", "1", *plan.options, *few, *own]


def _cell(plan: Plan, task: Task, init: Init, cfg: CfgNode, trial: int) -> Cell:
    cell = Cell(plan.root, task.name, init.name, trial, seed=trial)
    options = _options(plan, init, trial)
    step = training_step(
        "train", task.config, cell.folder, options, cfg.SOLVER.MAX_ITER, plan.num_gpus
    )
    cell.steps = (step,)
    cell.inputs = settings(cfg)
    if init.weights:
        cell.files = {init.weights: init.sha256}
    return cell


def settings(cfg: CfgNode) -> dict[str, Any]:
    """What a config sets otherwise than the defaults do, by key, but for what differs by trial and
    by where a run is written."""
    defaults = get_cfg()
    add_moco_config(defaults)
    base, flat = flattened(defaults), flattened(cfg)
    own = {"SEED", "OUTPUT_DIR", "MODEL.WEIGHTS"}
    return {k: v for k, v in flat.items() if k not in own and base.get(k, ...) != v}


def refuse(problems: Sequence[str]) -> None:
    """
    Raises:
        UserError: all problems at once, if there are any.
    """
    if problems:
        distinct = list(dict.fromkeys(problems))
        raise UserError(
            "\n  ".join([f"{len(distinct)} problem(s), nothing was started", *distinct])
        )
