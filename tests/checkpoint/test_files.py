"""Weight files: what is read, what is refused, and writing that leaves no half file."""

import io
import os
import pickle
from argparse import Namespace
from collections import OrderedDict
from datetime import date

import numpy as np
import pytest
import torch

from moco_d2.checkpoint.files import (
    WeightsError,
    read_weight_file,
    replaced_file,
    write_weight_file,
)


class RunsCode:
    def __reduce__(self):
        return os.system, ("touch was_run",)


@pytest.mark.parametrize("protocol", [2, 4, 5])
def test_arrays_are_read_at_every_pickle_protocol(tmp_path, protocol):
    arrays = OrderedDict(a=np.arange(6.0).reshape(2, 3), b=np.array(3), c=np.zeros(0, np.float16))
    content = {"model": arrays, "__author__": "someone", "matching_heuristics": True}
    (tmp_path / "x.pkl").write_bytes(pickle.dumps(content, protocol))
    file = read_weight_file(str(tmp_path / "x.pkl"))
    for name, array in arrays.items():
        assert file.state[name].shape == array.shape
        np.testing.assert_array_equal(file.state[name].numpy(), array)
    assert file.meta == {"__author__": "someone", "matching_heuristics": True}


def test_arrays_of_both_numpy_generations_are_read(tmp_path):
    data = pickle.dumps({"model": {"a": np.arange(3.0)}}, 2)
    assert b"numpy.core.multiarray" in data or b"numpy._core.multiarray" in data
    for module in (b"numpy.core.multiarray", b"numpy._core.multiarray"):
        other = data.replace(b"numpy._core.multiarray", b"numpy.core.multiarray")
        other = other.replace(b"numpy.core.multiarray", module)
        (tmp_path / "x.pkl").write_bytes(other)
        assert read_weight_file(str(tmp_path / "x.pkl")).state["a"].tolist() == [0, 1, 2]


@pytest.mark.parametrize("suffix", [".pkl", ".pth"])
def test_a_file_that_would_run_code_is_refused(tmp_path, suffix, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / f"x{suffix}"
    if suffix == ".pkl":
        path.write_bytes(pickle.dumps({"model": {"a": RunsCode()}}))
    else:
        torch.save({"model": {"a": RunsCode()}}, path)
    with pytest.raises(WeightsError, match="cannot be read as a file of tensors and plain Python"):
        read_weight_file(str(path))
    assert [p.name for p in tmp_path.iterdir()] == [path.name]


def test_a_pickled_class_is_refused_with_its_name(tmp_path):
    (tmp_path / "x.pkl").write_bytes(pickle.dumps({"model": {"a": torch.zeros(2)}}))
    with pytest.raises(WeightsError, match="it asks for torch"):
        read_weight_file(str(tmp_path / "x.pkl"))


@pytest.mark.parametrize("zipped", [True, False])
def test_every_global_that_a_file_asks_for_is_named(tmp_path, zipped, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "x.pth"
    content = {"model": {"a": torch.rand(3)}, "args": Namespace(lr=1.0), "date": date(2020, 1, 1)}
    torch.save({**content, "hook": RunsCode()}, path, _use_new_zipfile_serialization=zipped)
    with pytest.raises(WeightsError, match="argparse.Namespace, datetime.date, posix.system; if"):
        read_weight_file(str(path))
    assert not (tmp_path / "was_run").exists()
    torch.save(content, path, _use_new_zipfile_serialization=zipped)
    file = read_weight_file(str(path), unsafe_pickle=True)
    assert torch.equal(file.state["a"], content["model"]["a"])
    assert file.meta["args"].lr == 1.0


def test_unsafe_pickles_of_tensors_are_read_on_request(tmp_path):
    path = tmp_path / "x.pkl"
    path.write_bytes(pickle.dumps({"model": {"a": torch.ones(2)}, "args": Namespace(lr=1.0)}))
    with pytest.raises(WeightsError, match="argparse.Namespace, .*if you trust its origin"):
        read_weight_file(str(path))
    assert read_weight_file(str(path), unsafe_pickle=True).state["a"].tolist() == [1, 1]


@pytest.mark.parametrize("suffix", [".pth", ".pkl", ".tar"])
def test_what_a_file_is_shows_in_its_content_not_in_its_name(tmp_path, suffix):
    torch.save({"a": torch.ones(2)}, tmp_path / f"x{suffix}")
    assert read_weight_file(str(tmp_path / f"x{suffix}")).state["a"].tolist() == [1, 1]


def damaged(kind: str) -> bytes:
    whole = io.BytesIO()
    torch.save({"model": {"a": torch.rand(1000)}}, whole)
    return {
        "empty": b"",
        "web page": b"<!DOCTYPE html><html><body>404</body></html>",
        "truncated": whole.getvalue()[:2000],
    }[kind]


@pytest.mark.parametrize("suffix", [".pkl", ".pth"])
@pytest.mark.parametrize("kind", ["empty", "web page", "truncated"])
def test_a_damaged_file_is_refused_in_one_line(tmp_path, suffix, kind):
    path = tmp_path / f"x{suffix}"
    path.write_bytes(damaged(kind))
    with pytest.raises(WeightsError, match="cannot be read") as error:
        read_weight_file(str(path))
    assert str(path) in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "content, message",
    [
        ([1, 2], "holds a list, not a dict of tensors"),
        ({"model": {}}, "holds no tensors"),
        ({"model": {"a": "text"}}, "'a' is a str, where a tensor is expected"),
        ({"model": {"a": np.array(["text"])}}, "'a' is a ndarray, where a tensor is expected"),
        ({"model": {3: np.zeros(2)}}, "3 is a Tensor"),
    ],
)
def test_content_other_than_tensors_is_refused(tmp_path, content, message):
    (tmp_path / "x.pkl").write_bytes(pickle.dumps(content))
    with pytest.raises(WeightsError, match=message):
        read_weight_file(str(tmp_path / "x.pkl"))


def test_a_missing_file_is_refused(tmp_path):
    with pytest.raises(WeightsError, match="there is no weight file .*nothing.pth"):
        read_weight_file(str(tmp_path / "nothing.pth"))


def test_bare_and_wrapped_state_dicts_and_ddp_prefixes_read_the_same(tmp_path):
    state = {"a.weight": torch.rand(2), "b": torch.tensor(1)}
    prefixed = {f"module.{n}": t for n, t in state.items()}
    for content in (state, {"model": state}, {"state_dict": prefixed, "epoch": 3}, prefixed):
        torch.save(content, tmp_path / "x.pth")
        file = read_weight_file(f"{tmp_path}/x.pth?matching_heuristics=True")
        assert {n: t.tolist() for n, t in file.state.items()} == {
            n: t.tolist() for n, t in state.items()
        }


@pytest.mark.parametrize("suffix", [".pkl", ".pth", ".safetensors"])
def test_written_files_read_back(tmp_path, suffix):
    path = str(tmp_path / f"x{suffix}")
    state = {"w": torch.rand(2, 3), "n": torch.tensor(5)}
    write_weight_file(path, {"model": state, "input": {"format": "RGB"}})
    file = read_weight_file(path)
    assert all(torch.equal(file.state[n], t) for n, t in state.items())
    assert file.meta == {"input": {"format": "RGB"}}


def test_replaced_file_appears_whole_or_not_at_all(tmp_path):
    path = tmp_path / "x.pkl"
    with replaced_file(str(path)) as aside:
        assert aside.endswith(".pkl")
        with open(aside, "w") as f:
            f.write("first")
        assert not path.exists()
    assert path.read_text() == "first"
    with pytest.raises(RuntimeError, match="stop"), replaced_file(str(path)) as aside:
        with open(aside, "w") as f:
            f.write("second")
        raise RuntimeError("stop")
    assert path.read_text() == "first"
    assert list(tmp_path.iterdir()) == [path]
