"""Reading image files: formats, orientation, colour modes, and what cannot be read."""

import os

import cv2
import numpy as np
import pytest
import skimage.data
from PIL import Image

from moco_d2.data.image_io import read_image
from moco_d2.data.pixels import UnreadableImage

FOLDER = os.path.dirname(skimage.data.__file__)
MEAN = (123.675, 116.28, 103.53)
ORIENTATION = 0x0112

# EXIF orientation -> how the stored pixels become upright, from the EXIF standard.
UPRIGHT = {
    1: lambda x: x,
    2: lambda x: x[:, ::-1],
    3: lambda x: x[::-1, ::-1],
    4: lambda x: x[::-1],
    5: lambda x: x.transpose(1, 0, 2),
    6: lambda x: np.rot90(x, -1),
    7: lambda x: np.rot90(x, 2).transpose(1, 0, 2),
    8: lambda x: np.rot90(x, 1),
}


@pytest.fixture(scope="module")
def photo() -> Image.Image:
    return Image.open(os.path.join(FOLDER, "coffee.png")).convert("RGB").resize((120, 80))


def mean_difference(ours: np.ndarray, expected: np.ndarray) -> float:
    assert ours.dtype == np.uint8 and ours.shape == expected.shape
    return np.abs(ours.astype(int) - expected.astype(int)).mean()


@pytest.mark.parametrize("extension", ["jpg", "png", "webp", "bmp", "tif"])
def test_formats(photo, tmp_path, extension):
    path = tmp_path / f"photo.{extension}"
    photo.save(path)
    ours = read_image(str(path), MEAN)
    expected = np.asarray(Image.open(path).convert("RGB"))
    # Decoders of lossy formats may round differently, but not more.
    assert mean_difference(ours, expected) < (0.5 if extension in ("jpg", "webp") else 1e-9)
    assert ours.flags.c_contiguous


@pytest.mark.parametrize("options", [{"progressive": True}, {"subsampling": 0}, {"quality": 30}])
def test_kinds_of_jpeg(photo, tmp_path, options):
    path = tmp_path / "photo.jpg"
    photo.save(path, **options)
    expected = np.asarray(Image.open(path).convert("RGB"))
    assert mean_difference(read_image(str(path), MEAN), expected) < 0.5


@pytest.mark.parametrize("extension", ["jpg", "png", "webp", "tif"])
@pytest.mark.parametrize("orientation", UPRIGHT)
def test_exif_orientation(photo, tmp_path, extension, orientation):
    exif = Image.Exif()
    exif[ORIENTATION] = orientation
    path = tmp_path / f"photo.{extension}"
    options = {"quality": 98} if extension in ("jpg", "webp") else {}
    photo.save(path, exif=exif, **options)
    expected = UPRIGHT[orientation](np.asarray(photo))
    assert mean_difference(read_image(str(path), MEAN), expected) < 5


def test_jpeg_with_a_thumbnail_in_its_exif_data(photo, tmp_path):
    exif = Image.Exif()
    exif[ORIENTATION] = 6
    path = tmp_path / "photo.jpg"
    thumbnail = tmp_path / "thumbnail.jpg"
    photo.resize((12, 8)).save(thumbnail)
    # A JPEG inside an application segment has end markers of its own.
    photo.save(path, exif=exif, quality=98)
    data, inner = path.read_bytes(), thumbnail.read_bytes()
    segment = b"\xff\xe9" + (len(inner) + 2).to_bytes(2, "big") + inner
    path.write_bytes(data[:2] + segment + data[2:])
    assert mean_difference(read_image(str(path), MEAN), UPRIGHT[6](np.asarray(photo))) < 5
    path.write_bytes(data[:2] + segment + data[2 : len(data) // 2])
    with pytest.raises(UnreadableImage, match="truncated"):
        read_image(str(path), MEAN)


MODES = [
    *(("jpg", mode) for mode in ("L", "CMYK")),
    *(("png", mode) for mode in ("L", "1", "P")),
    *(("bmp", mode) for mode in ("L", "1", "P")),
    *(("tif", mode) for mode in ("L", "1", "P", "CMYK")),
]


@pytest.mark.parametrize("extension, mode", MODES)
def test_colour_modes_become_rgb(photo, tmp_path, extension, mode):
    path = tmp_path / f"photo.{extension}"
    photo.convert(mode).save(path)
    expected = np.asarray(Image.open(path).convert("RGB"))
    assert mean_difference(read_image(str(path), MEAN), expected) < 0.5


TRANSPARENT = {
    "png": ("RGBA", "LA", "P"),
    "webp": ("RGBA",),
    "tif": ("RGBA", "LA"),
}


@pytest.mark.parametrize("extension, mode", [(e, m) for e in TRANSPARENT for m in TRANSPARENT[e]])
def test_transparent_pixels_show_the_mean(tmp_path, extension, mode):
    rgba = np.full((20, 30, 4), 200, np.uint8)
    rgba[..., 3] = 255
    rgba[:10, :, 3] = 0
    image = Image.fromarray(rgba)
    image = image.quantize(4) if mode == "P" else image.convert(mode)
    path = tmp_path / f"photo.{extension}"
    image.save(path, **({"lossless": True} if extension == "webp" else {}))
    ours = read_image(str(path), MEAN)
    assert np.abs(ours[:10] - np.array(MEAN)).max() <= 1
    assert np.abs(ours[10:] - 200.0).max() <= 1


def test_half_transparent_pixels_are_mixed(tmp_path):
    Image.new("RGBA", (4, 4), (255, 0, 100, 128)).save(tmp_path / "half.png")
    ours = read_image(str(tmp_path / "half.png"), (100.0, 100.0, 100.0))
    assert np.abs(ours - np.array([177.8, 49.8, 100.0])).max() <= 1


@pytest.mark.parametrize("extension", ["png", "tif"])
@pytest.mark.parametrize("channels", [1, 3])
def test_sixteen_bits_become_eight(tmp_path, extension, channels):
    gray = np.linspace(0, 65535, 600).astype(np.uint16).reshape(20, 30)
    image = gray if channels == 1 else np.dstack([gray, gray // 2, gray // 4])
    path = tmp_path / f"deep.{extension}"
    cv2.imwrite(str(path), image[..., ::-1] if channels == 3 else image)
    expected = np.repeat(image[..., None], 3, 2) if channels == 1 else image
    ours = read_image(str(path), MEAN)
    assert np.abs(ours.astype(int) - (expected >> 8)).max() <= 1


@pytest.mark.parametrize("extension", ["jpg", "png", "webp", "bmp", "tif"])
@pytest.mark.parametrize("share", [0.1, 0.5, 0.9])
def test_truncated_files_are_unreadable(photo, tmp_path, capfd, extension, share):
    path = tmp_path / f"cut.{extension}"
    photo.save(path)
    data = path.read_bytes()
    path.write_bytes(data[: int(len(data) * share)])
    with pytest.raises(UnreadableImage) as error:
        read_image(str(path), MEAN)
    assert error.value.path == str(path)
    assert 0 < len(error.value.reason) < 150
    assert capfd.readouterr().err == ""  # nothing from the decoders' C code


def test_progressive_jpeg_cut_between_its_scans_is_unreadable(photo, tmp_path):
    path = tmp_path / "cut.jpg"
    photo.save(path, progressive=True)
    data = path.read_bytes()
    path.write_bytes(data[: data.rfind(b"\xff\xda")])
    with pytest.raises(UnreadableImage, match="truncated"):
        read_image(str(path), MEAN)


def test_bytes_after_the_end_of_a_jpeg_do_no_harm(photo, tmp_path):
    path = tmp_path / "photo.jpg"
    photo.save(path)
    before = read_image(str(path), MEAN)
    path.write_bytes(path.read_bytes() + b"\x00" * 100 + b"trailer")
    np.testing.assert_array_equal(read_image(str(path), MEAN), before)


@pytest.mark.parametrize(
    "content, reason",
    [
        (b"", "the file is empty"),
        (b"this is a text\n", "not an image"),
        (b"\xff\xd8\xff", "not an image"),
        (b"\x89PNG\r\n\x1a\n", "not an image"),
    ],
)
def test_files_that_are_no_images(tmp_path, capfd, content, reason):
    path = tmp_path / "text.jpg"
    path.write_bytes(content)
    with pytest.raises(UnreadableImage, match=reason):
        read_image(str(path), MEAN)
    assert capfd.readouterr().err == ""


def test_missing_files_and_folders(tmp_path):
    with pytest.raises(UnreadableImage, match="no such file") as error:
        read_image(str(tmp_path / "none.jpg"), MEAN)
    assert str(error.value) == f"{tmp_path / 'none.jpg'}: no such file or directory"
    with pytest.raises(UnreadableImage, match="is a directory"):
        read_image(str(tmp_path), MEAN)


def test_floating_point_pixels_are_refused(tmp_path):
    Image.fromarray(np.zeros((4, 4), np.float32)).save(tmp_path / "float.tif")
    with pytest.raises(UnreadableImage, match="floating point"):
        read_image(str(tmp_path / "float.tif"), MEAN)
