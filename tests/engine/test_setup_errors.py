"""tools/train_net.py as a user meets it: errors in one line, and photographs of every kind."""

import os
import subprocess
import sys

import cv2
import numpy as np
import pytest
import skimage.data

from moco_d2.engine.setup import run

MAIN_CONFIG = ["--config", "configs/moco_pretrain.yaml"]


def fail(capsys, *argv) -> str:
    """Run in this process; returns the one line it prints to stderr."""
    assert run([*MAIN_CONFIG, *argv], "") == 2
    err = capsys.readouterr().err.strip()
    assert err.startswith("error: ") and "\n" not in err
    return err


def test_main_config_without_imagenet_names_the_folder_and_the_two_ways_out(tmp_path):
    """The main command as it stands, on a machine without ImageNet."""
    command = [sys.executable, "tools/train_net.py", *MAIN_CONFIG]
    env = {**os.environ, "DETECTRON2_DATASETS": str(tmp_path)}
    done = subprocess.run(command, capture_output=True, text=True, env=env)
    assert done.returncode == 2 and done.stdout == ""
    (message,) = done.stderr.strip().splitlines()
    assert message.startswith("error: ") and str(tmp_path / "imagenet" / "train") in message
    assert "DETECTRON2_DATASETS" in message and "DATASETS.TRAIN" in message


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["DATASETS.TRAIN", "('no/such/folder',)"], "no/such/folder"),
        (["MODEL.MOCO.TAU", "0.1"], "MODEL.MOCO.TAU"),
        (["MODEL.MOCO.QUEUE_SIZE", "big"], "QUEUE_SIZE"),
        (["SOLVER.AMP.ENABLED", "True", "SOLVER.AMP.PRECISION", "int8"], "float16"),
        (["LOG_PERIOD", "0"], "LOG_PERIOD is 0"),
        (["--eval-only"], "name a data set in DATASETS.TEST"),
    ],
)
def test_errors_are_one_line_and_nothing_is_written(argv, message, tmp_path, capsys, photographs):
    output = tmp_path / "out"
    data = ["DATASETS.TRAIN", f"('{photographs}',)", "OUTPUT_DIR", str(output)]
    flags = [a for a in argv if a.startswith("--")]
    assert message in fail(capsys, *flags, *data, *(a for a in argv if a not in flags))
    assert not output.exists()


def test_a_missing_config_file_is_named(capsys):
    assert run(["--config", "configs/none.yaml"], "") == 2
    assert capsys.readouterr().err == "error: no config file configs/none.yaml\n"


@pytest.fixture(scope="module")
def photographs(tmp_path_factory):
    """scikit-image's photographs: colour, grayscale, with alpha, and one cut off."""
    folder = tmp_path_factory.mktemp("photographs")
    colour = {name: getattr(skimage.data, name)() for name in ("astronaut", "coffee", "chelsea")}
    for name, image in colour.items():
        cv2.imwrite(str(folder / f"{name}.jpg"), image[..., ::-1])
    cv2.imwrite(str(folder / "camera_grayscale.png"), skimage.data.camera())
    alpha = np.full(colour["chelsea"].shape[:2], 128, np.uint8)
    rgba = np.dstack([colour["chelsea"][..., ::-1], alpha])
    cv2.imwrite(str(folder / "chelsea_alpha.png"), rgba)
    whole = (folder / "coffee.jpg").read_bytes()
    (folder / "truncated.jpg").write_bytes(whole[: len(whole) // 2])
    return folder


def test_photographs_train_on_two_processes_from_the_command_line(photographs, tmp_path):
    command = [sys.executable, "tools/train_net.py", *MAIN_CONFIG, "--num-gpus", "2"]
    options = {
        "DATASETS.TRAIN": f"('{photographs}',)",
        "MODEL.RESNETS.DEPTH": 18,
        "MODEL.RESNETS.RES2_OUT_CHANNELS": 64,
        "MODEL.BN_GROUP_SIZE": 2,
        "MODEL.MOCO.QUEUE_SIZE": 10,
        "INPUT.VIEWS.SIZE": 32,
        "SOLVER.IMS_PER_BATCH": 8,
        "SOLVER.EPOCHS": 5,
        "DATALOADER.NUM_WORKERS": 1,
        "OUTPUT_DIR": tmp_path,
    }
    command += [str(item) for pair in options.items() for item in pair]
    done = subprocess.run(command, capture_output=True, text=True)
    log = done.stdout + done.stderr
    assert done.returncode == 0, log
    assert "MODEL.DEVICE cuda -> cpu: no CUDA on this machine" in log
    assert "MAX_ITER 3" in log  # 5 epochs of 6 images, 8 a step
    assert "truncated.jpg" in log and "So far 1 of 6" in log
    assert (tmp_path / "config.yaml").exists() and (tmp_path / "model_final.pth").exists()
