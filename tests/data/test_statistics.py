"""Statistics of a data set against NumPy's, and the tool that prints them."""

import importlib.util
from pathlib import Path

import cv2
import numpy as np
import pytest
import yaml
from detectron2.config import get_cfg
from PIL import Image

from moco_d2 import add_moco_config
from moco_d2.data.datasets import load_image_index
from moco_d2.data.image_io import read_image
from moco_d2.data.pixels import PixelFormat
from moco_d2.data.statistics import measure_statistics

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def tool():
    spec = importlib.util.spec_from_file_location("tool", ROOT / "tools/dataset_stats.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def pasted(output: str):
    """The config with the lines that the tool printed."""
    cfg = get_cfg()
    add_moco_config(cfg)
    cfg.merge_from_other_cfg(type(cfg)(yaml.safe_load(output[output.index("MODEL:") :])))
    return cfg


@pytest.mark.parametrize("workers", [0, 2])
def test_mean_std_sizes_unreadable_files_and_copies(tool, tmp_path, capsys, workers):
    rng = np.random.default_rng(0)
    images = [rng.integers(0, 100 + 50 * i, (10 + i, 20, 3), dtype=np.uint8) for i in range(3)]
    for i, image in enumerate(images):
        Image.fromarray(image).save(tmp_path / f"{i}.png")
    (tmp_path / "copy.png").write_bytes((tmp_path / "1.png").read_bytes())
    (tmp_path / "empty.jpg").touch()
    assert tool.main([str(tmp_path), "--workers", str(workers)]) == 0
    output = capsys.readouterr().out
    assert "4 images read, 1 unreadable" in output
    assert f"{tmp_path}/empty.jpg: the file is empty" in output
    assert "width 20 to 20, median 20, height 10 to 12, median 11" in output
    assert "1 files are copies of others" in output
    assert f"{tmp_path}/1.png = {tmp_path}/copy.png" in output
    counted = [images[i].reshape(-1, 3).astype(float) for i in (0, 1, 1, 2)]
    mean = np.mean([pixels.mean(0) for pixels in counted], axis=0)
    std = np.sqrt(np.mean([(pixels**2).mean(0) for pixels in counted], axis=0) - mean**2)
    cfg = pasted(output)
    np.testing.assert_allclose(cfg.MODEL.PIXEL_MEAN, mean, atol=1e-3)
    np.testing.assert_allclose(cfg.MODEL.PIXEL_STD, std, atol=1e-3)
    assert cfg.INPUT.FORMAT == "RGB"


def test_sixteen_bits_get_a_range_and_the_moments_within_it(tool, tmp_path, capsys):
    rng = np.random.default_rng(0)
    for i in range(4):
        deep = rng.normal(2000, 200, (50, 60)).astype(np.uint16)
        deep[0, 0] = 65535  # a hot pixel
        cv2.imwrite(str(tmp_path / f"{i}.tif"), deep)
    assert tool.main([str(tmp_path), "--channels", "1"]) == 0
    cfg = pasted(capsys.readouterr().out)
    low, high = cfg.INPUT.DEEP_RANGE
    assert 1300 < low < 1500 and 2500 < high < 2800
    pixels = PixelFormat((0.0,), (low, high))
    read = np.stack([read_image(str(tmp_path / f"{i}.tif"), pixels) for i in range(4)])
    np.testing.assert_allclose(cfg.MODEL.PIXEL_MEAN, read.mean(), atol=1e-3)
    np.testing.assert_allclose(cfg.MODEL.PIXEL_STD, read.std(), atol=1e-3)


def test_a_sample_is_spread_evenly(tmp_path):
    for i in range(10):
        Image.new("L", (4 + i, 4)).save(tmp_path / f"{i}.png")
    index = load_image_index([str(tmp_path)])
    *_, statistics = measure_statistics(index, channels=1, sample=4)
    assert [width for _, width in statistics.shapes] == [4, 7, 10, 13]


def test_arrays_that_are_no_images_are_counted(tool, tmp_path, capsys):
    np.save(tmp_path / "float.npy", np.zeros((4, 4), np.float32))
    np.save(tmp_path / "good.npy", np.arange(16).reshape(4, 4))
    assert tool.main([str(tmp_path), "--channels", "1"]) == 0
    output = capsys.readouterr().out
    assert "1 images read, 1 unreadable" in output and "floating point" in output


def test_nothing_readable_is_one_line(tool, tmp_path, capsys):
    (tmp_path / "empty.jpg").touch()
    assert tool.main([str(tmp_path)]) == 2
    assert capsys.readouterr().err.startswith("error: None of 1 images can be read")
    assert tool.main([str(tmp_path / "nowhere")]) == 2
    assert "neither a registered data set" in capsys.readouterr().err
