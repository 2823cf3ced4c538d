"""A run is a function of its config and seed: any processes, workers and accumulation agree."""

import json

import numpy as np
import pytest
import torch
from detectron2.utils import comm
from support import run_processes, tiny_pretrain_config, tiny_vit_options

from moco_d2.engine.distributed import unwrap
from moco_d2.engine.trainer import PretrainTrainer

V3 = {
    "MODEL__META_ARCHITECTURE": "MoCoV3",
    "MODEL__MOCO__HEAD": "mlp_bn",
    "MODEL__MOCO__MLP_DIM": 32,
    "INPUT__VIEWS__QUERY": "moco_v3_1",
    "INPUT__VIEWS__KEY": "moco_v3_2",
}
METHODS = {
    "v1": {
        "MODEL__MOCO__HEAD": "linear",
        "MODEL__MOCO__TEMPERATURE": 0.07,
        "INPUT__VIEWS__QUERY": "moco_v1",
        "INPUT__VIEWS__KEY": "moco_v1",
    },
    "v2": {"MODEL__MOCO__HEAD": "mlp", "MODEL__MOCO__TEMPERATURE": 0.2},
    "v3": {**V3, "MODEL__BN_GROUP_SIZE": 0},
    "v3 in groups": V3,
    "v3 ViT": {**V3, **tiny_vit_options(), "MODEL__BN_GROUP_SIZE": 0},
}
ITERATIONS = 10


class Float64Trainer(PretrainTrainer):
    """Tells rounding from real differences."""

    @classmethod
    def build_model(cls, cfg):
        return super().build_model(cfg).double()


def _train(trainer_class, cfg, folder):
    trainer = trainer_class(cfg)
    trainer.train()
    torch.save(unwrap(trainer.model).state_dict(), f"{folder}/state_{comm.get_rank()}.pth")


@pytest.fixture(scope="module")
def run(images, tmp_path_factory):
    """Train in so many processes, workers and parts; returns losses and each process's state."""
    done = {}

    def run(trainer_class, method, processes=1, workers=0, parts=1):
        key = (trainer_class, method, processes, workers, parts)
        if key not in done:
            folder = tmp_path_factory.mktemp("run")
            cfg = tiny_pretrain_config(
                folder,
                DATASETS__TRAIN=(str(images),),
                DATALOADER__NUM_WORKERS=workers,
                SOLVER__MAX_ITER=ITERATIONS,
                SOLVER__IMS_PER_BATCH=32,
                SOLVER__BASE_LR=0.003,
                SOLVER__ACCUMULATE=parts,
                MODEL__MOCO__MOMENTUM=0.9,
                **{"MODEL__BN_GROUP_SIZE": 8, **METHODS[method]},
            )
            run_processes(_train, processes, trainer_class, cfg, str(folder))
            lines = map(json.loads, (folder / "metrics.json").read_text().splitlines())
            losses = {r["iteration"]: r["loss_contrastive"] for r in lines}
            assert list(losses) == list(range(ITERATIONS))
            states = [torch.load(folder / f"state_{rank}.pth") for rank in range(processes)]
            done[key] = list(losses.values()), states
        return done[key]

    return run


def relative_difference(a: dict, b: dict, prefix: str) -> float:
    """|a - b| / |b| of all floating point tensors whose name starts so, as one vector."""
    names = [n for n in b if n.startswith(prefix) and b[n].is_floating_point()]
    a, b = (torch.cat([s[n].double().flatten() for n in names]) for s in (a, b))
    return ((a - b).norm() / b.norm()).item()


@pytest.mark.parametrize(
    ("trainer_class", "method", "processes", "workers", "parts", "tolerance"),
    [
        # float32: rounding grows from step to step, with a head's batch norms beyond 1e-4.
        (PretrainTrainer, "v1", 2, 0, 1, 1e-4),
        (PretrainTrainer, "v1", 1, 2, 4, 1e-4),
        (PretrainTrainer, "v2", 2, 1, 2, 1e-4),
        (PretrainTrainer, "v2", 4, 0, 1, 1e-4),
        (PretrainTrainer, "v2", 1, 0, 2, 1e-4),
        (Float64Trainer, "v1", 1, 0, 4, 1e-9),
        (Float64Trainer, "v3", 2, 0, 1, 1e-9),
        (Float64Trainer, "v3 in groups", 1, 0, 4, 1e-9),
        (Float64Trainer, "v3 ViT", 2, 0, 1, 1e-9),
        (Float64Trainer, "v2", 2, 0, 2, 1e-9),
    ],
)
def test_same_losses_and_weights_as_one_process(
    run, trainer_class, method, processes, workers, parts, tolerance
):
    expected_losses, (expected,) = run(trainer_class, method)
    losses, states = run(trainer_class, method, processes, workers, parts)
    np.testing.assert_allclose(losses, expected_losses, rtol=tolerance)
    for state in states:
        for prefix in {name.split(".")[0] for name in expected}:
            # The dictionary is outputs of both encoders, whose rounding adds up in them.
            allowed = tolerance * (10 if prefix == "dictionary" else 1)
            assert relative_difference(state, expected, f"{prefix}.") < allowed, prefix
        for name, tensor in states[0].items():
            assert torch.equal(state[name], tensor), f"{name} differs between processes"


def test_runs_with_another_seed_differ(run, images, tmp_path):
    """The comparisons above can fail."""
    losses, _ = run(PretrainTrainer, "v2")
    cfg = tiny_pretrain_config(
        tmp_path,
        DATASETS__TRAIN=(str(images),),
        SOLVER__MAX_ITER=2,
        SOLVER__IMS_PER_BATCH=32,
        MODEL__BN_GROUP_SIZE=8,
        MODEL__MOCO__MOMENTUM=0.9,
        SEED=8,
    )
    run_processes(_train, 1, PretrainTrainer, cfg, str(tmp_path))
    first = json.loads((tmp_path / "metrics.json").read_text().splitlines()[0])
    assert abs(first["loss_contrastive"] / losses[0] - 1) > 1e-2
