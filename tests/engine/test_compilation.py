"""torch.compile changes neither losses nor names, and its absence does not stop a run."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import torch
from support import TinyBackbone, random_views
from torch import nn

from moco_d2.engine.compilation import compile_encoders_
from moco_d2.modeling.batch_norm import BatchNormGroups
from moco_d2.modeling.dictionary import KeyQueue
from moco_d2.modeling.encoder import Encoder
from moco_d2.modeling.moco import MoCo


def make_moco():
    torch.manual_seed(0)
    encoder = Encoder(TinyBackbone(4), "out", nn.Linear(4, 6), BatchNormGroups(4))
    return MoCo(
        encoder=encoder,
        dictionary=KeyQueue(20, 6),
        temperature=0.2,
        shuffle=True,
        seed=0,
        pixel_mean=[120.0] * 3,
        pixel_std=[60.0] * 3,
    ).train()


def losses_of(model, steps=3):
    optimizer = torch.optim.SGD(model.encoder_q.parameters(), 0.1)
    losses = []
    for step in range(steps):
        loss = model({"views": random_views(8, 8, step)})["loss_contrastive"]
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        model.finish_step(0.9)
        losses.append(loss.item())
    return losses


def test_compiled_encoders_give_the_same_run_and_the_same_checkpoint():
    plain, compiled = make_moco(), make_moco()
    assert compile_encoders_(compiled)
    np.testing.assert_allclose(losses_of(compiled), losses_of(plain), rtol=1e-4)
    assert list(compiled.state_dict()) == list(plain.state_dict())
    for name, tensor in plain.state_dict().items():
        np.testing.assert_allclose(
            compiled.state_dict()[name], tensor, rtol=1e-3, atol=1e-4, err_msg=name
        )


WITHOUT_COMPILER = """
import logging
logging.basicConfig(format="%(levelname)s %(message)s")
from test_compilation import compile_encoders_, losses_of, make_moco
model = make_moco()
print(compile_encoders_(model), losses_of(model) == losses_of(make_moco()))
"""


def test_a_machine_that_cannot_compile_gets_one_warning_and_trains(tmp_path):
    """In a process of its own: what has been compiled once needs no compiler any more."""
    folders = [str(Path(__file__).parent), str(Path(__file__).parents[1])]
    env = {
        **os.environ,
        "CXX": "no-such-compiler",
        "TORCHINDUCTOR_CACHE_DIR": str(tmp_path),
        "PYTHONPATH": os.pathsep.join([*folders, os.environ.get("PYTHONPATH", "")]),
    }
    command = [sys.executable, "-c", WITHOUT_COMPILER]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert done.stdout.split() == ["False", "True"], done.stderr
    warnings = [line for line in done.stderr.splitlines() if line.startswith("WARNING MODEL")]
    assert len(warnings) == 1 and "going on without" in warnings[0]
