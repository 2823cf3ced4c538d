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
        (["MODEL.META_ARCHITECTURE", "MoCov3"], "'MoCov3'; known: GeneralizedRCNN, "),
        (["MODEL.BACKBONE.NAME", "resnet50"], "'resnet50'; known: build_plain_resnet_fpn_backbone"),
        (["MODEL.RESNETS.DEPTH", "20"], "DEPTH is 20; known: (18, 34, 50, 101, 152)"),
        (["MODEL.RESNETS.DEPTH", "18"], "RES2_OUT_CHANNELS is 256"),
        (["MODEL.RESNETS.OUT_FEATURES", "['res6']"], "OUT_FEATURES is ['res6']; give at least one"),
        (["MODEL.RESNETS.NORM", "BatchNorm"], "MODEL.RESNETS.NORM is 'BatchNorm'; known: BN, "),
        (["MODEL.RESNETS.NORM", "SyncBN"], "RESNETS.NORM is SyncBN: in pretraining"),
        (["MODEL.MOCO.HEAD", "mpl"], "MODEL.MOCO.HEAD is 'mpl'; known"),
        (["MODEL.MOCO.DIM", "0"], "MODEL.MOCO.DIM is 0"),
        (["MODEL.MOCO.MOMENTUM_SCHEDULE", "linear"], "'linear'; known: ['constant', 'cosine']"),
        (["MODEL.DEVICE", "tpu"], "MODEL.DEVICE is 'tpu'"),
        (["MODEL.PIXEL_STD", "[0.0, 1.0, 1.0]"], "deviations above 0"),
        (["MODEL.PIXEL_MEAN", "[1.0]"], "a value for each channel"),
        (["INPUT.VIEWS.SIZE", "0"], "INPUT.VIEWS.SIZE is 0"),
        (["INPUT.VIEWS.KEY", "moco"], "Unknown view recipe 'moco'"),
        (["SOLVER.OPTIMIZER", "ADAM"], "'ADAM'; known: ADAMW, LARS, SGD"),
        (["SOLVER.LR_SCHEDULER_NAME", "Cosine"], "'Cosine'; known: WarmupMultiStepLR, "),
        (["SOLVER.BASE_LR", "0.0"], "BASE_LR is 0; it must be above 0"),
        (["SOLVER.EPOCHS", "0", "SOLVER.MAX_ITER", "0"], "MAX_ITER is 0"),
        (
            ["SOLVER.CLIP_GRADIENTS.ENABLED", "True", "SOLVER.CLIP_GRADIENTS.CLIP_TYPE", "full"],
            "CLIP_TYPE is 'full'; known: value, norm",
        ),
        (["DATALOADER.NUM_WORKERS", "-1"], "NUM_WORKERS is -1; it must be at least 0"),
        (["TEST.KNN.K", "0"], "TEST.KNN.K is 0"),
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


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"MODEL: [", "as YAML: while parsing a flow node"),
        (b"MODEL only", "it holds no KEY: VALUE lines"),
        (bytes(range(128, 256)), "as YAML: "),
    ],
)
def test_a_file_that_is_no_config_is_named(tmp_path, capsys, content, message):
    path = tmp_path / "config.yaml"
    path.write_bytes(content)
    assert run(["--config", str(path)], "") == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: {path} is no config") and message in line


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
