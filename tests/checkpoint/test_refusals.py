"""What is no good file is refused: its own message, a status that is not 0, and no output."""

import importlib.util
import os
import pickle
from pathlib import Path

import pytest
import torch
import torchvision
from layouts import SAMPLES, states

TOOL = Path(__file__).parents[2] / "tools" / "convert_weights.py"
CONV = "module.encoder_q.layer2.0.conv1.weight"  # 128 x 64 x 3 x 3
NORM = "module.encoder_q.layer3.1.bn2.running_var"


@pytest.fixture(scope="module")
def main():
    torch.set_num_threads(1)
    spec = importlib.util.spec_from_file_location("convert_weights", TOOL)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.main


class RunsCode:
    def __reduce__(self):
        return os.system, ("touch was_run",)


def moco() -> dict:
    return SAMPLES["moco"].content(*states("resnet18"))


def changed(change):
    """The bytes of official MoCo's checkpoint after a change of its state dict."""

    def save(path: Path) -> None:
        content = moco()
        change(content["state_dict"])
        torch.save(content, path)

    return save


def stated_depth(path: Path) -> None:
    content = SAMPLES["moco_d2"].content(*states("resnet18"))
    content["recipe"]["backbone"]["depth"] = 34
    torch.save(content, path)


def truncated(path: Path) -> None:
    torch.save(moco(), path)
    path.write_bytes(path.read_bytes()[:100_000])


def truncated_safetensors(path: Path) -> None:
    SAMPLES["timm, safetensors"].save(path.parent).rename(path)
    path.write_bytes(path.read_bytes()[:100_000])


def truncated_pickle(path: Path) -> None:
    arrays = {name: t.numpy() for name, t in states("resnet18")[0].items()}
    path.write_bytes(pickle.dumps({"model": arrays})[:100_000])


def runs_code(path: Path) -> None:
    torch.save({**moco(), "hook": RunsCode()}, path)


def another_architecture(path: Path) -> None:
    torch.save(torchvision.models.mobilenet_v3_small(weights=None).state_dict(), path)


def grouped(path: Path) -> None:
    network = torchvision.models.resnet18(weights=None)
    network.layer1[0].conv2 = torch.nn.Conv2d(64, 64, 3, groups=2, bias=False)
    torch.save(network.state_dict(), path)


# What is wrong with the file -> how it is written, its name's end, the status, the message.
CASES = {
    "a tensor missing": (changed(lambda s: s.pop(CONV)), ".pth.tar", 1, f"missing: {CONV[7:]}"),
    "a norm's tensor missing": (changed(lambda s: s.pop(NORM)), ".pth", 1, f"missing: {NORM[7:]}"),
    "renamed": (
        changed(lambda s: s.update({CONV.replace("conv1", "conv7"): s.pop(CONV)})),
        ".pth",
        1,
        "not used: encoder_q.layer2.0.conv7.weight",
    ),
    "transposed": (
        changed(lambda s: s.update({CONV: s[CONV].transpose(0, 1)})),
        ".pth",
        1,
        f"wrong shape: {CONV[7:]} is 64x128x3x3 where 128x64x3x3 is needed",
    ),
    "left over": (
        changed(lambda s: s.update({"module.teacher.w": torch.zeros(1)})),
        ".pth",
        1,
        "not used: teacher.w",
    ),
    "of a depth that no ResNet has": (
        changed(lambda s: [s.pop(n) for n in list(s) if ".layer3.1." in n]),
        ".pth",
        1,
        "blocks per stage [2, 2, 1, 2] are those of no ResNet that is known",
    ),
    "of another depth than it states": (stated_depth, ".pth", 1, "of depth 34 - missing:"),
    "of another architecture": (another_architecture, ".pth", 2, "are of no known format"),
    "of a changed ResNet": (grouped, ".pth", 1, "2 groups and 64 channels in res2"),
    "truncated": (truncated, ".pth", 2, "truncated, damaged or no weight file"),
    "truncated safetensors": (truncated_safetensors, ".safetensors", 2, "weight file (Error while"),
    "a truncated pickle": (truncated_pickle, ".pkl", 2, "no weight file (pickle data was trunc"),
    "empty": (lambda path: path.touch(), ".pth", 2, "it is empty"),
    "a web page": (
        lambda path: path.write_text("<!DOCTYPE html><html>404 Not Found</html>"),
        ".pth",
        2,
        "it is a web page, not a weight file: the download failed",
    ),
    "a pointer of Git LFS": (
        lambda path: path.write_text("version https://git-lfs.github.com/spec/v1\noid x"),
        ".pth",
        2,
        "pointer of Git LFS",
    ),
    "a pickle that would run code": (
        lambda path: path.write_bytes(pickle.dumps({"model": RunsCode()})),
        ".pkl",
        2,
        "it asks for posix.system; if you trust its origin, read it with --unsafe-pickle",
    ),
    "a checkpoint that would run code": (runs_code, ".pth", 2, "it asks for posix.system"),
    "a checkpoint with an argument list": (
        lambda path: SAMPLES["pixpro"].save(path.parent).rename(path),
        ".pth",
        2,
        "it asks for argparse.Namespace; if you trust",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_it_is_refused(main, tmp_path, monkeypatch, capsys, case):
    write, end, status, message = CASES[case]
    monkeypatch.chdir(tmp_path)
    source = tmp_path / f"source{end}"
    write(source)
    report = str(tmp_path / "report.json")
    assert main([str(source), str(tmp_path / "out.pkl"), "--report", report]) == status
    captured = capsys.readouterr()
    assert message in captured.err
    assert captured.err.count("\n") == 1
    assert captured.out == ""
    assert [p.name for p in tmp_path.iterdir()] == [source.name]


def test_messages_are_different():
    messages = [message for *_, message in CASES.values()]
    assert len(set(messages)) == len(messages)


def test_unsafe_files_are_read_only_on_request(main, tmp_path, capsys):
    source = str(SAMPLES["pixpro"].save(tmp_path))
    assert main([source, str(tmp_path / "out.pkl"), "--unsafe-pickle"]) == 0
    assert "PixPro, official, query encoder, ResNet-18 to res5" in capsys.readouterr().out
