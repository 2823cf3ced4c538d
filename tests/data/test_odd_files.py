"""A folder of files as people really have them: the run finishes and names what it left out."""

import json
import logging
import os
import zlib

import cv2
import numpy as np
import pytest
from PIL import Image
from support import tiny_pretrain_config

from moco_d2.data.build import build_pretrain_loader
from moco_d2.data.datasets import load_image_index
from moco_d2.engine.trainer import PretrainTrainer
from moco_d2.errors import UserError

MEAN = (123.675, 116.28, 103.53)
UNREADABLE = {
    "truncated.jpg": "truncated",
    "empty.jpg": "the file is empty",
    "text.jpg": "not an image",
    "bomb.png": "more than INPUT.MAX_PIXELS",
    "nowhere.jpg": "no such file",
}


def chunk(kind: bytes, data: bytes) -> bytes:
    return len(data).to_bytes(4, "big") + kind + data + zlib.crc32(kind + data).to_bytes(4, "big")


def write_bomb(path) -> None:
    """A PNG of some kilobytes that decodes to 2.7 gigabytes."""
    size = 30_000
    header = size.to_bytes(4, "big") * 2 + b"\x08\x02\0\0\0"
    pixels = zlib.compress(b"\0" * (3 * size + 1) * 100, 9)
    path.write_bytes(
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", pixels) + chunk(b"IEND", b"")
    )


@pytest.fixture(scope="module")
def odd_files(tmp_path_factory) -> str:
    root = tmp_path_factory.mktemp("odd files ü 日本")
    coarse = np.random.default_rng(0).integers(0, 256, (6, 8, 3), dtype=np.uint8)
    photo = Image.fromarray(coarse).resize((120, 90), Image.Resampling.BICUBIC)
    deep = np.asarray(photo).astype(np.uint16) * 257
    for extension in ("png", "tif"):
        cv2.imwrite(str(root / f"deep colour.{extension}"), deep)
        cv2.imwrite(str(root / f"deep gray.{extension}"), deep[..., 0])
    photo.convert("CMYK").save(root / "cmyk.jpg")
    exif = Image.Exif()
    exif[0x0112] = 6
    photo.save(root / "sideways.jpg", exif=exif)
    photo.quantize(16).save(root / "palette.png")
    photo.convert("1").save(root / "one bit.png")
    rgba = photo.convert("RGBA")
    rgba.putalpha(photo.convert("L"))
    rgba.save(root / "transparent.webp")
    photo.save(root / "animated.gif", save_all=True, append_images=[photo.rotate(90)] * 3)
    Image.new("RGB", (1, 1), (9, 99, 199)).save(root / "pixel.png")
    Image.new("RGB", (8000, 8), (9, 99, 199)).save(root / "line.png")
    photo.save(root / "ünicode 日本 name.jpg")
    photo.save(root / "truncated.jpg")
    data = (root / "truncated.jpg").read_bytes()
    (root / "truncated.jpg").write_bytes(data[: len(data) // 2])
    (root / "empty.jpg").touch()
    (root / "text.jpg").write_text("not an image")
    write_bomb(root / "bomb.png")
    (root / "nowhere.jpg").symlink_to("missing.jpg")
    return str(root)


def peak_memory_mb() -> float:
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) / 1e3 for line in status if line.startswith("VmHWM"))


@pytest.mark.parametrize("num_workers", [0, 2])
def test_what_can_be_read_is_and_the_rest_is_named(odd_files, num_workers):
    index = load_image_index([odd_files])
    before = peak_memory_mb()
    loader = build_pretrain_loader(
        index,
        batch_size=len(index),
        size=32,
        recipes=("moco_v2", "moco_v2"),
        seed=0,
        pixel_mean=MEAN,
        num_iters=2,
        num_workers=num_workers,
    )
    first, second = loader
    unreadable = {os.path.basename(path): reason for _, path, reason in first["unreadable"]}
    assert unreadable.keys() == UNREADABLE.keys()
    for name, reason in UNREADABLE.items():
        assert reason in unreadable[name]
    assert len(first["index"]) == len(second["index"]) == len(index) == 18
    assert peak_memory_mb() - before < 300


def test_a_run_on_them_finishes_and_names_what_it_left_out(odd_files, tmp_path, caplog):
    cfg = tiny_pretrain_config(
        tmp_path,
        DATASETS__TRAIN=(odd_files,),
        DATALOADER__MAX_UNREADABLE=0.5,
        DATALOADER__NUM_WORKERS=1,
        INPUT__MAX_PIXELS=1_000_000,
    )
    with caplog.at_level(logging.WARNING):
        PretrainTrainer(cfg).train()
    lines = (tmp_path / "metrics.json").read_text().splitlines()
    assert json.loads(lines[-1])["iteration"] == 3
    for name in UNREADABLE:
        assert f"{name} (" in caplog.text
    assert "So far 5 of 18" in caplog.text


def test_too_many_stop_a_run_and_say_what_to_raise(odd_files, tmp_path):
    cfg = tiny_pretrain_config(tmp_path, DATASETS__TRAIN=(odd_files,), SOLVER__MAX_ITER=8)
    with pytest.raises(UserError, match="or raise DATALOADER.MAX_UNREADABLE"):
        PretrainTrainer(cfg).train()
    cfg.DATALOADER.MAX_UNREADABLE = 3.0
    with pytest.raises(UserError, match="DATALOADER.MAX_UNREADABLE is 3: it must be a share"):
        PretrainTrainer(cfg)


def test_files_without_permission_are_named(tmp_path):
    """The superuser can read them, and everyone else is told that they cannot."""
    (tmp_path / "images").mkdir()
    Image.new("RGB", (8, 8)).save(tmp_path / "images" / "good.jpg")
    locked = tmp_path / "images" / "locked.jpg"
    Image.new("RGB", (8, 8)).save(locked)
    locked.chmod(0)
    index = load_image_index([str(tmp_path / "images")])
    loader = build_pretrain_loader(
        index,
        batch_size=2,
        size=8,
        recipes=("moco_v1", "moco_v1"),
        seed=0,
        pixel_mean=MEAN,
        num_iters=1,
    )
    (batch,) = loader
    expected = [] if os.access(locked, os.R_OK) else ["permission denied"]
    assert [reason for _, _, reason in batch["unreadable"]] == expected
