"""The quick probe, from weight files and folders to a table; killed, resumed, refused."""

import dataclasses
import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import cv2
import jobs
import numpy as np
import pytest
import torch
from layouts import save_vit
from support import tiny_pretrain_config
from test_knn import colour_folder
from weights import moco_checkpoint

from moco_d2.engine.environment import Job
from moco_d2.evaluation.feature_store import FeatureStore
from moco_d2.evaluation.frozen_features import FrozenFeatures, random_features
from moco_d2.evaluation.judging import Labelled, _knn, judge
from moco_d2.evaluation.probe import Settings, _extract, extract, load_sets, run_probe
from moco_d2.visualization.confusion import draw_confusion

TOOL = Path(__file__).parents[2] / "tools" / "probe.py"
SETTINGS = Settings(size=32, batch_size=4, images_per_file=8, epochs=2)
CONFIG = str(Path(__file__).parents[2] / "configs" / "moco_pretrain.yaml")
RANDOM = ["MODEL.RESNETS.DEPTH", "18", "MODEL.RESNETS.RES2_OUT_CHANNELS", "64"]


@pytest.fixture(scope="module")
def tool():
    spec = importlib.util.spec_from_file_location("probe_tool", TOOL)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """15 and 5 pictures of each of two classes."""
    root = tmp_path_factory.mktemp("images")
    return {name: colour_folder(root / name, n, n) for name, n in (("train", 15), ("val", 5))}


@pytest.fixture
def weights(tmp_path):
    path = tmp_path / "moco.pth"
    torch.save(moco_checkpoint(18, "res3"), path)
    return path


def command(folders, output, *arguments, size="32"):
    sets = [f"--{name}={folder}" for name, folder in folders.items()]
    return [*sets, "--output", str(output), "--size", size, "--epochs", "20", *arguments]


def test_help_shows_examples(tool, capsys):
    assert os.access(TOOL, os.X_OK)
    assert TOOL.read_text().startswith("#!/usr/bin/env python\n")
    with pytest.raises(SystemExit):
        tool.main(["--help"])
    assert "--few-labels 0.01" in capsys.readouterr().out


def test_several_weights_give_one_table(tool, folders, weights, tmp_path, capsys):
    output = tmp_path / "probe"
    inits = ["--init", f"moco={weights}", "--init", "random", "--config", CONFIG, *RANDOM]
    assert tool.main(command(folders, output, *inits)) == 0
    table = capsys.readouterr().out
    assert (
        "10 images of 2 classes, by 30 labelled ones; always the most frequent class: 50" in table
    )
    content = json.loads((output / "results.json").read_text())
    for name, width, stage in (("moco", 128, "res3"), ("random", 512, "res5")):
        result = content["results"][name]
        assert f"{width}, ResNet-18 to {stage}" in table
        assert result["features"] == width and result["images"] == {"train": 30, "val": 10}
        assert list(result["knn"]) == ["1", "5", "10", "20", "30"]  # not more than there are
        # Dark and bright are told apart by anything.
        assert result["best"]["knn"] == {"k": 1, "top1": 100.0, "top5": 100.0}
        assert result["best"]["linear"]["top1"] == 100.0
        expected = {"images": 5, "knn": 100.0, "linear": 100.0}
        assert result["per_class"] == {"bright": expected, "dark": expected}
        assert result["confused"] == []
        assert cv2.imread(str(output / f"confusion_{name}.png")).std() > 1
    assert content["sets"]["train"] == [str(folders["train"])]
    assert content["results"]["moco"]["input"]["pixel_mean"] == [123.675, 116.28, 103.53]


def files(output):
    return {str(f): f.stat().st_mtime_ns for f in Path(output, "features").rglob("*.npz")}


def test_features_are_computed_again_for_changed_weights_alone(tool, folders, weights, tmp_path):
    arguments = command(folders, tmp_path / "probe", "--init", f"moco={weights}")
    results = []
    for change in (False, False, True):
        if change:
            content = torch.load(weights, weights_only=True)
            content["model"]["encoder_q.backbone.stem.conv1.weight"] += 0.1
            torch.save(content, weights)
        assert tool.main(arguments) == 0
        content = json.loads((tmp_path / "probe" / "results.json").read_text())
        results.append((files(tmp_path / "probe"), content["results"]["moco"]["fingerprint"]))
    (first, one), (second, two), (third, three) = results
    assert (first, one) == (second, two) and len(first) == 2
    assert three != one and len(third) == 4 and first.items() <= third.items()


class Watched(FrozenFeatures):
    """Writes down how many images it was shown, and is killed in a batch."""

    kill_in_batch = None

    def forward(self, batch):
        self.shown = [*getattr(self, "shown", []), len(batch["image"])]
        if len(self.shown) == self.kill_in_batch:
            jobs.kill_this_process()
        return super().forward(batch)


def watched(kill_in_batch=None):
    network = random_features(tiny_pretrain_config(), seed=0)
    network.__class__ = Watched
    network.kill_in_batch = kill_in_batch
    return network


def _extract_and_die(folder, images):
    torch.set_num_threads(1)
    extract(watched(5), images.index, images.wanted, FeatureStore(folder, {}), SETTINGS)


def test_a_killed_extraction_goes_on_and_reads_no_image_twice(folders, tmp_path):
    """Killed in the fifth batch of 4 images; every 8 are written."""
    images = load_sets([str(folders["train"])], [str(folders["val"])])["train"]
    killed, whole = FeatureStore(tmp_path / "a", {}), FeatureStore(tmp_path / "b", {})
    process = jobs.start_function(_extract_and_die, tmp_path / "a", images)
    assert jobs.finish([process], 200) == [-9]
    missing = killed.missing(images.wanted)
    assert missing.tolist() == list(range(16, 30))
    second = watched()
    extract(second, images.index, missing, killed, SETTINGS)
    assert sum(second.shown) == 14
    assert len(killed.missing(images.wanted)) == 0
    extract(watched(), images.index, images.wanted, whole, SETTINGS)
    for ours, expected in zip(*(s.load(images.wanted) for s in (killed, whole)), strict=True):
        np.testing.assert_allclose(ours, expected, rtol=1e-5, atol=1e-6)


@torch.no_grad()
def test_images_come_in_the_channel_order_of_the_weights(tmp_path):
    cfg = tiny_pretrain_config(INPUT__FORMAT="BGR", MODEL__PIXEL_MEAN=[103.5, 116.3, 123.7])
    network, store = random_features(cfg, seed=0), FeatureStore(tmp_path / "store", {})
    for label in ("a", "b"):
        (tmp_path / label).mkdir()
        bgr = np.full((40, 40, 3), (250, 120, 10), np.uint8)
        cv2.imwrite(str(tmp_path / label / "0.png"), bgr)
    images = load_sets([str(tmp_path)], [str(tmp_path)])["val"]
    extract(network, images.index, images.wanted, store, SETTINGS)
    shown = torch.tensor([250, 120, 10], dtype=torch.uint8).view(1, 3, 1, 1).expand(1, 3, 32, 32)
    _, features = store.load(images.wanted)
    torch.testing.assert_close(torch.from_numpy(features[:1]), network({"image": shown}))


def test_few_labels_are_extended_to_all(folders, tmp_path):
    """2 of 15 images of each class; then all, of which only the other 26 and no others are read."""
    network = watched()
    both = {"own": network, "again": network}
    for few, shown in ((2.0, 4 + 10), (0.0, 26)):
        settings = dataclasses.replace(SETTINGS, few_labels=few)
        sets = load_sets([str(folders["train"])], [str(folders["val"])], few)
        network.shown = []
        results = run_probe(both, sets, str(tmp_path), settings, Job())["results"]
        assert sum(network.shown) == shown
        assert results["own"]["images"]["train"] == (int(2 * few) or 30)
        assert results["again"] == results["own"]


def _extract_on_processes(folder, images):
    store = FeatureStore(folder, {})
    _extract([("own", watched(), images.index, images.wanted, store)], SETTINGS)


def test_processes_share_the_images(folders, tmp_path):
    images = load_sets([str(folders["train"])], [str(folders["val"])])["train"]
    jobs.run_on_processes(_extract_on_processes, 2, tmp_path / "two", images)
    together, alone = (FeatureStore(tmp_path / name, {}) for name in ("two", "one"))
    read = [file["numbers"].tolist() for file in together._files()]
    assert sorted(n for part in read for n in part) == list(range(30))
    assert all(len({n % 2 for n in part}) == 1 for part in read)
    extract(watched(), images.index, images.wanted, alone, SETTINGS)
    for ours, expected in zip(*(s.load(images.wanted) for s in (together, alone)), strict=True):
        np.testing.assert_allclose(ours, expected, rtol=1e-5, atol=1e-6)


def test_an_unreadable_image_is_left_out_and_not_tried_again(tmp_path):
    folders = {name: colour_folder(tmp_path / name, 4, 4) for name in ("train", "val")}
    (folders["train"] / "dark" / "2.png").write_bytes(b"no image")
    sets = load_sets([str(folders["train"])], [str(folders["val"])])
    network = watched()
    for shown in (7 + 8, 0):
        network.shown = []
        content = run_probe({"own": network}, sets, str(tmp_path / "out"), SETTINGS, Job())
        assert sum(network.shown) == shown
        assert content["results"]["own"]["images"] == {"train": 7, "val": 8}


def test_judgements_equal_those_of_the_definitions():
    """Three classes that overlap: every number of results.json from NumPy, in float64."""
    rng = np.random.default_rng(0)
    centres = rng.normal(size=(3, 6))
    labels = {"train": rng.integers(0, 3, 60), "val": rng.integers(0, 3, 40)}
    features = {n: centres[y] + rng.normal(size=(len(y), 6)) for n, y in labels.items()}
    train, val = (
        Labelled(torch.from_numpy(features[n]), torch.from_numpy(labels[n])) for n in labels
    )
    result, confusion = judge(
        train, val, "abc", neighbours=(1, 7, 500), learning_rates=(1.0, 10.0), epochs=5
    )
    unit = {n: x / np.linalg.norm(x, axis=1, keepdims=True) for n, x in features.items()}
    similarity = unit["val"] @ unit["train"].T
    assert list(result["knn"]) == ["1", "7", "60"]
    for k, scores in result["knn"].items():
        right = 0
        for row, label in zip(similarity, labels["val"], strict=True):
            nearest = np.argsort(-row, kind="stable")[: int(k)]
            votes = np.zeros(3)
            np.add.at(votes, labels["train"][nearest], np.exp(row[nearest] / 0.07))
            right += votes.argmax() == label
        assert scores == {"top1": pytest.approx(100 * right / 40), "top5": 100.0}
    assert confusion.sum() == 40
    np.testing.assert_array_equal(confusion.sum(1), np.bincount(labels["val"]))
    top1 = 100 * confusion.trace() / 40
    assert result["best"]["linear"]["top1"] == pytest.approx(top1)
    assert top1 == pytest.approx(max(r["top1"] for r in result["linear"].values()))
    assert top1 < 100
    for name, row, i in zip("abc", confusion, range(3), strict=True):
        assert result["per_class"][name]["linear"] == pytest.approx(100 * row[i] / row.sum())
    mistakes = {
        ("abc".index(pair["class"]), "abc".index(pair["taken_for"])): pair["images"]
        for pair in result["confused"]
    }
    assert mistakes == {(i, j): n for (i, j), n in np.ndenumerate(confusion) if i != j and n}
    assert list(mistakes.values()) == sorted(mistakes.values(), reverse=True)


def test_votes_that_are_kept_hold_no_other_classes_in_memory():
    rng = np.random.default_rng(0)
    train, val = (
        Labelled(torch.from_numpy(rng.normal(size=(n, 6))), torch.arange(n) % 12) for n in (40, 30)
    )
    _, ranked = _knn(train, val, 12, (1, 7), 0.07)
    for first in ranked.values():
        assert first.shape == (30, 5)
        assert first.untyped_storage().nbytes() == first.nbytes


def test_standardised_features_do_not_depend_on_their_scale():
    rng = np.random.default_rng(0)
    labels = torch.from_numpy(rng.integers(0, 3, 80))
    features = torch.from_numpy(rng.normal(size=(80, 6)) + labels.numpy()[:, None])
    linear = []
    for scale, standardised in ((1, True), (1000, True), (1000, False)):
        scaled = features * torch.tensor([scale, 1, 1, 1, 1, 1])
        parts = [Labelled(scaled[part], labels[part]) for part in (slice(50), slice(50, 80))]
        result, _ = judge(*parts, "abc", epochs=5, standardised=standardised)
        linear.append(result["linear"])
    assert linear[0] == linear[1] != linear[2]


def test_a_class_name_with_dollars_is_no_formula(tmp_path):
    path = tmp_path / "confusion.png"
    draw_confusion(np.array([[3, 1], [0, 4]]), ["$x_$", "plain"], str(path), "title")
    assert cv2.imread(str(path)).std() > 1


def test_results_are_written_though_a_picture_cannot_be(folders, tmp_path):
    (tmp_path / "confusion_own.png").mkdir()
    sets = load_sets([str(folders["train"])], [str(folders["val"])])
    with pytest.raises(IsADirectoryError):
        run_probe({"own": watched()}, sets, str(tmp_path), SETTINGS, Job())
    content = json.loads((tmp_path / "results.json").read_text())
    assert content["results"]["own"]["best"]["knn"]["top1"] == 100.0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--init", "moco=nothing.pth"], "there is no weight file nothing.pth"),
        (["--init", "random"], "--init random needs --config"),
        (["--init", "moco=x", "SEED", "1"], "'SEED 1' is for the config of --init random"),
        (["--init", "a/b=x"], "NAME=FILE with a name of letters"),
        (["--init", "random=x"], "'random' alone"),
        (["--few-labels", "16", "--init", "random"], "--few-labels is 16, and there are only 15"),
        (["--learning-rates", "1", "0", "--init", "random"], "give different numbers above 0"),
        (["--val={flat}", "--init", "random"], "without a class label.*--val"),
        (
            ["--val={other}", "--init", "random"],
            r"1 class\(es\) that --train does not have \(night",
        ),
        (["--train={one}", "--init", "random"], "images of 1 class: there is nothing to tell"),
    ],
)
def test_what_cannot_work_is_one_line_before_anything_is_read(
    tool, folders, tmp_path, capsys, arguments, message
):
    dark = folders["val"] / "dark"
    names = {"flat": dark, "other": tmp_path / "other", "one": tmp_path / "one"}
    for name, new in (("other", "night"), ("one", "dark")):
        names[name].mkdir()
        (names[name] / new).symlink_to(dark)
    arguments = [argument.format(**names) for argument in arguments]
    assert tool.main(command(folders, tmp_path / "probe", *arguments)) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ")
    assert re.search(message, line), line
    assert not (tmp_path / "probe").exists()


def test_weights_that_do_not_state_their_convention_need_it_stated(tool, folders, tmp_path, capsys):
    path = save_vit("timm_vit", tmp_path)
    arguments = command(folders, tmp_path / "probe", "--init", f"vit={path}", size="48")
    assert tool.main(arguments) == 2
    assert "state it with --format, --pixel-mean" in capsys.readouterr().err
    half = ["127.5"] * 3
    stated = ["--format", "RGB", "--pixel-mean", *half, "--pixel-std", *half]
    assert tool.main([*arguments, *stated]) == 0
    content = json.loads((tmp_path / "probe" / "results.json").read_text())
    assert content["results"]["vit"]["input"]["pixel_std"] == [127.5] * 3


def test_features_that_are_not_finite_are_refused(tool, folders, weights, tmp_path, capsys):
    content = torch.load(weights, weights_only=True)
    content["model"]["encoder_q.backbone.stem.conv1.weight"][0] = torch.nan
    torch.save(content, weights)
    assert tool.main(command(folders, tmp_path / "probe", "--init", f"moco={weights}")) == 2
    assert "are not finite numbers" in capsys.readouterr().err


def test_what_a_process_of_several_refuses_is_a_sentence(tmp_path, weights):
    """The second of two has all the images that cannot be read, more than 1 % of its share."""
    folders = {name: colour_folder(tmp_path / name, 4, 4) for name in ("train", "val")}
    for i in (1, 3):  # of 4 "bright" ones, which come first
        (folders["train"] / "bright" / f"{i}.png").write_bytes(b"no image")
    inits = ["--init", f"moco={weights}", "--num-gpus", "2", "--device", "cpu"]
    words = [sys.executable, str(TOOL), *command(folders, tmp_path / "probe", *inits)]
    done = subprocess.run(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert done.returncode == 2, done.stdout
    assert "2 of 4 images cannot be read, more than 1 %" in done.stdout
    assert "Traceback" not in done.stdout
