"""tools/visualize.py: the pictures show the images, views and features that are there."""

import os
import runpy
from pathlib import Path

import cv2
import numpy as np
import pytest
import torch
from matplotlib import pyplot as plt
from matplotlib.collections import PathCollection
from support import tiny_pretrain_config
from weights import moco_checkpoint

from moco_d2.data.datasets import load_image_index
from moco_d2.data.index import ImageIndex
from moco_d2.engine.trainer import PretrainTrainer
from moco_d2.errors import UserError
from moco_d2.evaluation.frozen_features import features_from_file
from moco_d2.visualization.embedding import NAMED, Map, draw_maps
from moco_d2.visualization.feature_pictures import (
    Reading,
    embedding_picture,
    features_of,
    neighbours_picture,
)
from moco_d2.visualization.neighbours import spread_over_classes
from moco_d2.visualization.views import draw_view_pairs

ROOT = Path(__file__).parents[2]
TOOL = ROOT / "tools/visualize.py"
main = runpy.run_path(str(TOOL))["main"]
CONFIG = str(ROOT / "configs/moco_pretrain.yaml")
SMALL = ["MODEL.RESNETS.DEPTH", "18", "MODEL.RESNETS.RES2_OUT_CHANNELS", "64"]
READING = Reading(size=32)


@pytest.fixture(scope="module")
def images(tmp_path_factory) -> Path:
    """5 pictures of each of 3 classes: noise around a colour. A name with $ is no formula."""
    root = tmp_path_factory.mktemp("images")
    rng = np.random.default_rng(0)
    for name, colour in (
        ("red", (40, 40, 200)),
        ("$green$", (40, 200, 40)),
        ("blue", (200, 40, 40)),
    ):
        (root / name).mkdir()
        for i in range(5):
            picture = rng.normal(colour, 25, (40, 40 + 4 * i, 3)).clip(0, 255)
            cv2.imwrite(str(root / name / f"{i}.png"), picture.astype(np.uint8))
    return root


@pytest.fixture(scope="module")
def weights(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("weights") / "moco.pth"
    torch.save(moco_checkpoint(18, "res3"), path)
    return path


@pytest.fixture
def network(weights):
    return features_from_file(str(weights))


def reference_features(network, index) -> np.ndarray:
    _, found = features_of({"moco": network}, index, np.arange(len(index)), READING)
    return found["moco"].numpy().astype(np.float64)


def test_help_shows_examples(capsys):
    assert os.access(TOOL, os.X_OK)
    with pytest.raises(SystemExit):
        main(["--help"])
    assert "tools/visualize.py embedding --images" in capsys.readouterr().out


def test_neighbours_are_those_of_the_features(images, network):
    index = load_image_index([str(images)])
    features = reference_features(network, index)
    np.testing.assert_allclose(np.linalg.norm(features, axis=1), 1, rtol=1e-6)
    similarity = features @ features.T
    np.fill_diagonal(similarity, -np.inf)
    figure = neighbours_picture({"moco": network}, index, READING, count=15, k=3)
    texts = [text.get_text() for text in figure.axes[0].texts]
    plt.close(figure)
    near = [text.split("  ") for text in texts if text[:2] in ("0.", "1.")]
    asked = spread_over_classes(index.labels, np.random.default_rng(0).permutation(15), 15)
    expected = []
    for i in asked:
        nearest = np.argsort(-similarity[i])[:3]
        expected += [[f"{similarity[i, j]:.2f}", index.classes[index.labels[j]]] for j in nearest]
    assert near == expected
    same = [
        index.classes[index.labels[i]] == n[1]
        for i, n in zip(np.repeat(asked, 3), near, strict=True)
    ]
    assert any(f"(moco {100 * np.mean(same):.0f} %)" in text for text in texts)


def test_neighbours_of_other_images(images, network, tmp_path):
    """A copy of an image of the data set is nearest to it; it has no class, so no frame either."""
    copy = tmp_path / "copy.png"
    copy.write_bytes((images / "blue/3.png").read_bytes())
    figure = neighbours_picture(
        {"moco": network},
        load_image_index([str(images)]),
        READING,
        queries=load_image_index([str(copy)]),
        k=2,
    )
    texts = [text.get_text() for text in figure.axes[0].texts]
    plt.close(figure)
    assert texts[1] == "1.00  blue"
    assert "Green" not in texts[-1]


def test_queries_take_turns_among_the_classes():
    labels = np.array([0, 0, 0, 0, 1, 1, 2])
    chosen = spread_over_classes(labels, np.array([3, 1, 0, 2, 5, 4, 6]), 5)
    assert chosen.tolist() == [3, 5, 6, 1, 4]


def scattered(figure) -> list[np.ndarray]:
    return [
        np.asarray(part.get_offsets())
        for axis in figure.axes
        for part in axis.collections
        if isinstance(part, PathCollection)
    ]


def test_the_map_of_principal_components_is_that_of_the_features(images, network):
    index = load_image_index([str(images)])
    figure = embedding_picture({"moco": network}, index, READING, method="pca")
    drawn = scattered(figure)
    legend = [text.get_text() for text in figure.legends[0].get_texts()]
    notes = [text.get_text() for text in figure.axes[0].texts]
    plt.close(figure)
    assert legend == list(index.classes)
    features = reference_features(network, index)
    centred = features - features.mean(axis=0)
    _, scale, directions = np.linalg.svd(centred, full_matrices=False)
    points = centred @ directions[:2].T
    for label, members in enumerate(reversed(drawn)):
        expected = points[index.labels == label]
        signs = np.sign((members * expected).sum(axis=0))
        np.testing.assert_allclose(members, signs * expected, atol=1e-5)
    share = 100 * (scale[:2] ** 2).sum() / (scale**2).sum()
    similarity = features @ features.T
    np.fill_diagonal(similarity, -np.inf)
    hits = 100 * np.mean(index.labels[similarity.argmax(axis=1)] == index.labels)
    assert notes == [
        f"PCA, {share:.0f} % of the variance; nearest neighbour of the same class: {hits:.0f} %"
    ]


def test_a_map_that_memory_cannot_hold_is_refused_before_images_are_read(network, tmp_path):
    count = 2_000_000  # 80 terabytes
    nowhere = ImageIndex([str(tmp_path / "nowhere.png")], [-1]).take(np.zeros(count, np.int64))
    said = "t-SNE of 2000000 images needs 80000.0 GB, and .* GB are free: lower --max-images, or"
    with pytest.raises(UserError, match=said):
        embedding_picture({"moco": network}, nowhere, READING, max_images=0)
    with pytest.raises(UserError, match="none of the images can be read"):  # it tried
        embedding_picture({"moco": network}, nowhere, READING, max_images=200)


def test_rare_classes_and_images_without_one_are_grey():
    labels = np.array([-1, *range(NAMED + 2), *range(NAMED)])
    classes = [f"class {i}" for i in range(NAMED + 2)]
    points = np.random.default_rng(0).normal(size=(len(labels), 2))
    figure = draw_maps({"a": Map(points, ""), "b": Map(points, "")}, labels, classes)
    names = [text.get_text() for text in figure.legends[0].get_texts()]
    parts = scattered(figure)
    plt.close(figure)
    assert names == [*classes[:NAMED], "2 other classes"]
    assert len(parts) == 2 * (NAMED + 1)
    np.testing.assert_array_equal(parts[0], points[[0, NAMED + 1, NAMED + 2]])
    figure = draw_maps({"a": Map(points, "")}, np.full(len(labels), -1), [])
    assert not figure.legends and len(scattered(figure)[0]) == len(labels)
    plt.close(figure)


def test_views_are_those_of_the_run(images, tmp_path):
    size = 128  # large enough that the sheet shows every pixel
    cfg = tiny_pretrain_config(
        tmp_path, DATASETS__TRAIN=(str(images),), INPUT__VIEWS__SIZE=size, INPUT__FORMAT="BGR"
    )
    draw_view_pairs(cfg, str(tmp_path / "views.png"), pairs=6, columns=2)
    sheet = cv2.imread(str(tmp_path / "views.png"))  # BGR, as the views
    batch = next(iter(PretrainTrainer.build_train_loader(cfg)))
    rows = [sheet[28 + i * (size + 4) :][: size + 4] for i in range(3)]
    for pair in range(6):
        for view in range(2):
            left = (pair % 2) * (3 * (size + 4) + 12) + (view + 1) * (size + 4)
            shown = rows[pair // 2][2:-2, left + 2 : left + 2 + size]
            expected = batch["views"][view][pair].permute(1, 2, 0).numpy()
            np.testing.assert_array_equal(shown, expected)


def test_the_tool_draws_each_picture(images, weights, tmp_path, capsys):
    inits = ["--init", f"moco={weights}", "--init", "random", "--config", CONFIG, "--size", "32"]
    sources = ["--images", str(images)]
    commands = {
        "views": ["--config", CONFIG, "--images", "3", "DATASETS.TRAIN", f"('{images}',)"]
        + ["MODEL.DEVICE", "cpu", "SOLVER.IMS_PER_BATCH", "8", "MODEL.BN_GROUP_SIZE", "4"]
        + ["MODEL.MOCO.QUEUE_SIZE", "64"],
        "neighbours": [*sources, *inits, "--count", "2", "--k", "3", *SMALL],
        "embedding": [*sources, *inits, "--max-images", "12", *SMALL],
    }
    for command, arguments in commands.items():
        path = tmp_path / f"{command}.png"
        assert main([command, "--output", str(path), *arguments]) == 0, capsys.readouterr().err
        assert cv2.imread(str(path)).std() > 10
        assert capsys.readouterr().out.endswith(f"{path}\n")


@pytest.mark.parametrize(
    "command, arguments, said",
    [
        ("neighbours", ["--images", "nowhere"], "nowhere"),
        ("neighbours", ["--init", "random"], "--init random needs --config"),
        ("neighbours", ["--output", "a.jpg"], "--output a.jpg does not end in .png"),
        ("neighbours", ["--output", "none/a.png"], "there is no folder none; make it first"),
        ("embedding", ["--device", "tpu"], "--device is 'tpu'; give cpu"),
        ("embedding", ["--max-images", "2"], "at least 3 images; 2 can be read"),
        ("embedding", ["--perplexity", "1"], "--perplexity is 1: give more"),
    ],
)
def test_errors_are_one_sentence(images, weights, capsys, command, arguments, said):
    common = ["--images", str(images), "--init", f"moco={weights}", "--size", "32"]
    assert main([command, *common, *arguments]) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("error: ") and said in error


def test_a_detector_has_no_views(tmp_path, capsys):
    config = str(ROOT / "configs/demo/scenes_faster_rcnn_R18_FPN.yaml")
    assert main(["views", "--config", config, "MODEL.DEVICE", "cpu"]) == 2
    assert "error: " in capsys.readouterr().err
