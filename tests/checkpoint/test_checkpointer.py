"""Checkpoints that survive: damage is noticed, old files outlive failed writes, few are kept."""

import contextlib
import os
import re
import resource
import subprocess

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from moco_d2.checkpoint.checkpointer import AtomicCheckpointer, CheckpointError


def checkpointer(folder, **options) -> AtomicCheckpointer:
    torch.manual_seed(0)
    return AtomicCheckpointer(nn.Linear(40, 30), str(folder), **options)


def save(folder, *iterations, **options) -> AtomicCheckpointer:
    writer = checkpointer(folder, **options)
    for iteration in iterations:
        writer.save(f"model_{iteration:07d}", iteration=iteration)
    return writer


def iterations(folder) -> list[int]:
    names = sorted(path.name for path in folder.glob("model_*.pth"))
    return [int(name[6:13]) for name in names]


def truncate(path):
    os.truncate(path, path.stat().st_size // 2)


def empty(path):
    os.truncate(path, 0)


def remove(path):
    path.unlink()


def flip_a_bit_of_a_weight(path):
    content = bytearray(path.read_bytes())
    weights = torch.load(path, weights_only=True)["model"]["weight"]
    content[content.index(weights.numpy().tobytes()) + 2] ^= 1
    path.write_bytes(content)
    assert not torch.equal(torch.load(path, weights_only=True)["model"]["weight"], weights)


DAMAGES = [truncate, empty, remove, flip_a_bit_of_a_weight]


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_newest_checkpoint_is_reported_and_the_one_before_is_used(
    tmp_path, caplog, damage
):
    save(tmp_path, 1, 3, 5)
    damage(tmp_path / "model_0000005.pth")
    reader = checkpointer(tmp_path)
    reader.logger.propagate = True
    assert reader.has_checkpoint()
    assert reader.resume_or_load("", resume=True)["iteration"] == 3
    assert "model_0000005.pth is damaged" in caplog.text


def test_two_damaged_ones_are_passed_over_and_all_damaged_is_an_error(tmp_path):
    save(tmp_path, 1, 3, 5)
    empty(tmp_path / "model_0000005.pth")
    truncate(tmp_path / "model_0000003.pth")
    assert checkpointer(tmp_path).get_checkpoint_file() == f"{tmp_path}/model_0000001.pth"
    flip_a_bit_of_a_weight(tmp_path / "model_0000001.pth")
    with pytest.raises(CheckpointError, match="none of the checkpoints in .* can be read"):
        checkpointer(tmp_path).get_checkpoint_file()


@settings(max_examples=60, deadline=None)
@given(where=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7))
def test_any_flipped_bit_is_noticed_or_changes_nothing(tmp_path_factory, where, bit):
    folder = tmp_path_factory.mktemp("flip")
    writer = save(folder, 1)
    path = folder / "model_0000001.pth"
    before = torch.load(path, weights_only=True)
    content = bytearray(path.read_bytes())
    content[int(where * len(content))] ^= 1 << bit
    path.write_bytes(content)
    try:
        found = writer.get_checkpoint_file()
    except CheckpointError:
        return
    after = torch.load(found, weights_only=True)
    assert after["iteration"] == before["iteration"] and after.keys() == before.keys()
    assert after["model"].keys() == before["model"].keys()
    assert all(torch.equal(after["model"][name], t) for name, t in before["model"].items())


def test_the_file_that_last_checkpoint_names_goes_first_and_newer_ones_are_of_another_run(
    tmp_path,
):
    save(tmp_path, 9, 1, 3)
    assert checkpointer(tmp_path).get_checkpoint_file() == f"{tmp_path}/model_0000003.pth"
    truncate(tmp_path / "model_0000003.pth")
    assert checkpointer(tmp_path).get_checkpoint_file() == f"{tmp_path}/model_0000001.pth"
    (tmp_path / "last_checkpoint").write_bytes(b"")
    assert checkpointer(tmp_path).get_checkpoint_file() == f"{tmp_path}/model_0000009.pth"


@settings(max_examples=25, deadline=None)
@given(keep=st.integers(0, 4), archive=st.integers(0, 4), count=st.integers(1, 12))
def test_the_newest_and_the_archived_are_kept(tmp_path_factory, keep, archive, count):
    """CHECKPOINT_PERIOD is 2 here, and CHECKPOINT_ARCHIVE_PERIOD a multiple of it."""
    folder = tmp_path_factory.mktemp("keep")
    ends = [2 * i - 1 for i in range(1, count + 1)]
    save(folder, *ends, keep=keep, archive_period=2 * archive)
    newest = ends[-keep:] if keep else ends
    archived = [i for i in ends if archive and (i + 1) % (2 * archive) == 0]
    assert iterations(folder) == sorted({*newest, *archived})
    assert (folder / "last_checkpoint").read_text() == f"model_{ends[-1]:07d}.pth"


def test_what_a_killed_save_left_is_removed_by_the_next(tmp_path):
    (tmp_path / ".model_0000003.4711.tmp.pth").write_bytes(b"half")
    save(tmp_path, 3)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["last_checkpoint", "model_0000003.pth"]


@contextlib.contextmanager
def mounted(folder, *arguments):
    """Mount something at a folder; yields why not, where the machine does not allow it."""
    try:
        subprocess.run(
            ["mount", *arguments, str(folder)], check=True, capture_output=True, text=True
        )
    except (subprocess.CalledProcessError, FileNotFoundError) as error:
        refusal = str(getattr(error, "stderr", error))
        assert re.search("superuser|permi|denied|No such file", refusal), refusal
        yield refusal
    else:
        try:
            yield None
        finally:
            subprocess.run(["umount", str(folder)], check=True)


def test_a_full_disk_is_a_clear_error_and_the_old_checkpoint_is_intact(tmp_path):
    """A file system of 64 KiB, a checkpoint of 8 KiB, and another of 200 KiB."""
    with mounted(tmp_path, "-t", "tmpfs", "-o", "size=64k", "tmpfs") as refusal:
        # Where no such disk can be had, files may grow no larger than it would be.
        limit = limited_files(64 << 10) if refusal else contextlib.nullcontext()
        writer = save(tmp_path, 1)
        before = (tmp_path / "model_0000001.pth").read_bytes()
        writer.model = nn.Linear(200, 250)
        with limit, pytest.raises(CheckpointError) as caught:
            writer.save("model_0000003")
        assert re.search("No space left on device|File too large", str(caught.value))
        assert f"{tmp_path}/model_0000001.pth is intact" in str(caught.value)
        assert (tmp_path / "model_0000001.pth").read_bytes() == before
        names = sorted(path.name for path in tmp_path.iterdir())
        assert names == ["last_checkpoint", "model_0000001.pth"]
        assert writer.get_checkpoint_file() == f"{tmp_path}/model_0000001.pth"


@contextlib.contextmanager
def limited_files(size: int):
    old = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, old[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, old)


@contextlib.contextmanager
def read_only(folder):
    """Root may write into any folder that is not on a read-only file system."""
    if os.geteuid():
        folder.chmod(0o555)
        try:
            yield
        finally:
            folder.chmod(0o755)
    else:
        with mounted(folder, "--bind", str(folder)) as refusal:
            if refusal is None:
                subprocess.run(["mount", "-o", "remount,bind,ro", str(folder)], check=True)
                yield
            else:
                # Root without the right to mount can still not write where a file is.
                aside = folder.with_name("aside")
                folder.rename(aside)
                folder.write_text("a file")
                yield
                folder.unlink()
                aside.rename(folder)


def test_a_read_only_folder_is_a_clear_error_and_the_old_checkpoint_is_intact(tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    writer = save(folder, 1)
    refused = pytest.raises(CheckpointError, match=r"cannot write the checkpoint .*--resume")
    with read_only(folder), refused:
        writer.save("model_0000003")
    assert writer.get_checkpoint_file() == f"{folder}/model_0000001.pth"
    assert iterations(folder) == [1]
