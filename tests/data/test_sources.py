"""Lists, tar shards, globs and mixtures name the same images as a folder does."""

import csv
import io
import os
import shutil
import tarfile

import numpy as np
import pytest
import torch
from detectron2.data import DatasetCatalog, MetadataCatalog
from detectron2.utils.file_io import PathHandler, PathManager
from PIL import Image

from moco_d2.data.build import build_pretrain_loader
from moco_d2.data.datasets import load_image_index
from moco_d2.data.paths import expand_braces, expand_paths
from moco_d2.data.pixels import UnreadableImage
from moco_d2.errors import UserError

MEAN = (123.675, 116.28, 103.53)
NAMES = ("a/0.jpg", "a/ü 1.png", "b/2.jpg", "b/3.webp", "b/4.jpg")


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> str:
    """Five images of two classes."""
    root = tmp_path_factory.mktemp("images")
    rng = np.random.default_rng(0)
    for name in NAMES:
        path = root / name
        path.parent.mkdir(exist_ok=True)
        pixels = rng.integers(0, 256, (6, 8, 3), dtype=np.uint8)
        Image.fromarray(pixels).resize((48, 40), Image.Resampling.BICUBIC).save(path)
    return str(root)


def write_shard(path, folder: str, names, labels=()) -> str:
    with tarfile.open(path, "w") as shard:
        for number, name in enumerate(names):
            shard.add(os.path.join(folder, name), name)
            if labels:
                text = str(labels[number]).encode()
                member = tarfile.TarInfo(os.path.splitext(name)[0] + ".cls")
                member.size = len(text)
                shard.addfile(member, io.BytesIO(text))
            member = tarfile.TarInfo(os.path.splitext(name)[0] + ".json")
            member.size = 2
            shard.addfile(member, io.BytesIO(b"{}"))
    return str(path)


def contents(names) -> list[bytes]:
    index = load_image_index(names)
    return [index.read(i) for i in range(len(index))]


def test_a_text_list_is_relative_to_itself_or_to_a_root(folder, tmp_path):
    inside = os.path.join(folder, "list.txt")
    with open(inside, "w") as file:
        file.write("\n".join(NAMES) + "\n\n")
    assert contents([inside]) == contents([folder])
    outside = shutil.move(inside, tmp_path / "list.txt")
    assert contents([f"{outside}?root={folder}"]) == contents([folder])
    (tmp_path / "absolute.txt").write_text(os.path.join(folder, NAMES[2]))
    assert contents([str(tmp_path / "absolute.txt")]) == contents([folder])[2:3]


def test_labels_of_a_text_list_follow_a_tab(tmp_path):
    (tmp_path / "list.txt").write_text("x.jpg\t10\ny z.jpg\t9\nw.jpg\n")
    index = load_image_index([str(tmp_path / "list.txt")])
    assert index.classes == ("9", "10") and index.labels.tolist() == [1, 0, -1]
    assert index.path(1) == str(tmp_path / "y z.jpg")


def test_a_csv_list(folder, tmp_path):
    path = tmp_path / "list.csv"
    with open(path, "w", newline="", encoding="utf-8-sig") as file:
        rows = csv.writer(file)
        rows.writerow(["id", "where", "label", "file_name"])
        rows.writerows([i, name, name[0], "none"] for i, name in enumerate(NAMES))
    name = f"{path}?root={folder}&column=where"
    assert contents([name]) == contents([folder])
    index = load_image_index([name])
    assert index.classes == ("a", "b") and index.labels.tolist() == [0, 0, 1, 1, 1]
    assert load_image_index([str(path)]).path(0) == str(tmp_path / "none")
    with pytest.raises(UserError, match="columns 'id', 'where'.*none of them is picture"):
        load_image_index([f"{path}?column=picture"])
    with pytest.raises(UserError, match="unknown options: a list takes root, column and label"):
        load_image_index([f"{path}?color=red"])


def test_a_parquet_list_without_pyarrow_says_what_to_do(tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "pyarrow", None)
    (tmp_path / "list.parquet").touch()
    with pytest.raises(UserError, match="pip install pyarrow, or write the list as CSV"):
        load_image_index([str(tmp_path / "list.parquet")])


def test_an_empty_list(tmp_path):
    (tmp_path / "list.txt").write_text("\n")
    with pytest.raises(FileNotFoundError, match="names no image"):
        load_image_index([str(tmp_path / "list.txt")])


def test_shards_hold_the_bytes_of_the_files(folder, tmp_path):
    first = write_shard(tmp_path / "s-00.tar", folder, NAMES[:2], labels=(3, 1))
    second = write_shard(tmp_path / "s-01.tar", folder, NAMES[2:], labels=(0, 0, 2))
    for name in (str(tmp_path / "s-{00..01}.tar"), str(tmp_path / "s-*.tar")):
        index = load_image_index([name])
        assert [index.read(i) for i in range(5)] == contents([folder])
        assert index.classes == ("0", "1", "2", "3")
        assert index.labels.tolist() == [3, 1, 0, 0, 2]
        assert index.path(1) == f"{first}/{NAMES[1]}" and index.path(2) == f"{second}/{NAMES[2]}"


def test_a_shard_that_is_cut_after_it_was_indexed_names_the_image(folder, tmp_path):
    shard = write_shard(tmp_path / "s.tar", folder, NAMES)
    index = load_image_index([shard])
    os.truncate(shard, 600)
    with pytest.raises(UnreadableImage, match="the shard ends before it") as error:
        index.read(4)
    assert error.value.path.endswith("s.tar/b/4.jpg")


@pytest.mark.parametrize("content", [b"no tar file", b"\x1f\x8b\x08\x00"])
def test_files_that_are_no_shards(tmp_path, content):
    (tmp_path / "s.tar").write_bytes(content)
    with pytest.raises(UserError, match="must be a whole, uncompressed tar file"):
        load_image_index([str(tmp_path / "s.tar")])


def test_a_missing_shard_of_a_range_is_named(folder, tmp_path):
    write_shard(tmp_path / "s-0.tar", folder, NAMES)
    with pytest.raises(UserError, match="s-1.tar' is neither"):
        load_image_index([str(tmp_path / "s-{0..1}.tar")])


def test_globs_single_files_and_unknown_kinds(folder, tmp_path):
    assert contents([os.path.join(folder, "**", "*.jpg")]) == [
        content for content, name in zip(contents([folder]), NAMES, strict=True) if "jpg" in name
    ]
    assert contents([os.path.join(folder, NAMES[1])]) == contents([folder])[1:2]
    (tmp_path / "images.lmdb").touch()
    with pytest.raises(UserError, match="images.lmdb' is neither a folder nor a file of a known"):
        load_image_index([str(tmp_path / "images.lmdb")])


@pytest.mark.parametrize(
    "pattern, paths",
    [
        ("s-{08..11}.tar", ["s-08.tar", "s-09.tar", "s-10.tar", "s-11.tar"]),
        ("{b,a}/{0..1}", ["b/0", "b/1", "a/0", "a/1"]),
        ("plain{}", ["plain{}"]),
        ("x{,y}", ["x", "xy"]),
    ],
)
def test_braces(pattern, paths):
    assert expand_braces(pattern) == paths


def test_a_name_with_magic_characters_that_exists_is_itself(tmp_path):
    (tmp_path / "photos [2024] {a,b}").mkdir()
    assert expand_paths(str(tmp_path / "photos [2024] {a,b}")) == [
        str(tmp_path / "photos [2024] {a,b}")
    ]


def test_sources_mix(folder, tmp_path):
    shard = write_shard(tmp_path / "s.tar", folder, NAMES[:3])
    everything = contents([folder])
    mixed = load_image_index([folder, shard, os.path.join(folder, "b")])
    read = [mixed.read(i) for i in range(len(mixed))]
    assert read == everything + everything[:3] + everything[2:]
    assert mixed.classes == ("a", "b")
    assert mixed.labels.tolist() == [0, 0, 1, 1, 1] + [-1] * 6


class _Elsewhere(PathHandler):
    """A store that only PathManager reaches."""

    def __init__(self, root: str):
        self._root = root

    def _get_supported_prefixes(self):
        return ["elsewhere://"]

    def _local(self, path: str) -> str:
        return os.path.join(self._root, path.removeprefix("elsewhere://"))

    def _get_local_path(self, path, force=False, **kwargs):
        return self._local(path)

    def _open(self, path, mode="r", buffering=-1, **kwargs):
        return open(self._local(path), mode)

    def _exists(self, path, **kwargs):
        return os.path.exists(self._local(path))

    def _isdir(self, path, **kwargs):
        return os.path.isdir(self._local(path))

    def _ls(self, path, **kwargs):
        return os.listdir(self._local(path))


def test_paths_go_through_the_path_manager(folder, tmp_path):
    write_shard(tmp_path / "s.tar", folder, NAMES)
    (tmp_path / "list.txt").write_text("\n".join(NAMES))
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    PathManager.register_handler(_Elsewhere(str(tmp_path)), allow_override=True)
    expected = contents([folder])
    assert contents(["elsewhere://a", "elsewhere://b"]) == expected
    assert contents(["elsewhere://list.txt"]) == expected
    assert contents(["elsewhere://s.tar"]) == expected


def test_every_source_gives_the_same_views(folder, tmp_path):
    (tmp_path / "list.txt").write_text("\n".join(NAMES))
    DatasetCatalog.register(
        "test_sources", lambda: [{"file_name": os.path.join(folder, name)} for name in NAMES]
    )
    try:
        batches = [
            list(
                build_pretrain_loader(
                    load_image_index([name]),
                    batch_size=4,
                    size=24,
                    recipes=("moco_v2", "moco_v2"),
                    seed=3,
                    pixel_mean=MEAN,
                    num_iters=3,
                )
            )
            for name in (
                folder,
                f"{tmp_path / 'list.txt'}?root={folder}",
                write_shard(tmp_path / "s.tar", folder, NAMES),
                "test_sources",
            )
        ]
    finally:
        DatasetCatalog.remove("test_sources")
        MetadataCatalog.pop("test_sources", None)
    for other in batches[1:]:
        for first, second in zip(batches[0], other, strict=True):
            assert torch.equal(first["index"], second["index"])
            for ours, theirs in zip(first["views"], second["views"], strict=True):
                assert torch.equal(ours, theirs)


def test_unlabeled_coco_is_registered():
    assert MetadataCatalog.get("coco_2017_unlabeled").image_root.endswith("coco/unlabeled2017")
    if not os.path.isdir(MetadataCatalog.get("coco_2017_unlabeled").image_root):
        with pytest.raises(FileNotFoundError, match="set DETECTRON2_DATASETS"):
            load_image_index(["coco_2017_unlabeled"])
