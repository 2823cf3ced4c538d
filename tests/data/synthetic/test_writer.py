"""Rendering to disk: repeatable, complete, and not done twice."""

import cv2
import numpy as np
import pytest

from moco_d2.data.synthetic import render_demo_data
from moco_d2.data.synthetic.__main__ import main
from moco_d2.data.synthetic.layouts import LAYOUTS, Coco
from moco_d2.data.synthetic.sets import SETS

SMALL = dict.fromkeys(SETS, 0) | {"objects_val": 34, "scenes_test": 25, "figures_train": 3}


def contents(root):
    return {
        str(file.relative_to(root)): file.read_bytes()
        for file in sorted(root.rglob("*"))
        if file.is_file()
    }


@pytest.fixture(scope="module")
def rendered(tmp_path_factory):
    root = tmp_path_factory.mktemp("rendered")
    render_demo_data(str(root), sizes=SMALL, workers=1)
    return root


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_bytes_do_not_depend_on_the_number_of_workers(tmp_path, layout):
    for workers in (1, 2, 3):
        render_demo_data(str(tmp_path / str(workers)), layout, SMALL, workers=workers)
    expected = contents(tmp_path / "1")
    assert len(expected) > 34 + 25
    assert contents(tmp_path / "2") == expected and contents(tmp_path / "3") == expected


def test_objects_are_stored_without_loss_in_the_folder_of_their_class(rendered):
    demo_set = SETS["objects_val"]
    for number in (1, 2, 16, 17):
        picture = demo_set.picture(number, seed=0)
        name = demo_set.classes[picture.label]
        stored = cv2.imread(str(rendered / f"objects/val/{name}/{number:06d}.png"))
        assert np.array_equal(stored[..., ::-1], picture.image)


def test_a_finished_set_is_not_rendered_again(rendered, tmp_path):
    render_demo_data(str(tmp_path), sizes=SMALL, workers=1)
    marked = next((tmp_path / "scenes/images/test").iterdir())
    marked.write_bytes(b"left alone")
    render_demo_data(str(tmp_path), sizes=SMALL, workers=1)
    assert marked.read_bytes() == b"left alone"
    # A set of another size is rendered; its neighbours still are not.
    render_demo_data(str(tmp_path), sizes=SMALL | {"objects_val": 35}, workers=1)
    assert marked.read_bytes() == b"left alone"


def test_a_set_grows_and_shrinks_to_what_it_would_be_if_rendered_afresh(rendered, tmp_path):
    larger = SMALL | {"objects_val": 50, "scenes_test": 31}
    render_demo_data(str(tmp_path), sizes=larger, workers=1)
    grown = contents(tmp_path)
    images = {k: v for k, v in contents(rendered).items() if k.endswith(".png")}
    assert images.items() <= grown.items()
    render_demo_data(str(tmp_path), sizes=SMALL, workers=1)
    assert contents(tmp_path) == contents(rendered)


def test_another_seed_replaces_the_pictures(rendered, tmp_path):
    render_demo_data(str(tmp_path), sizes=SMALL, seed=1, workers=1)
    other = contents(tmp_path)
    expected = contents(rendered)
    images = [name for name in expected if "/images/" in name or name.startswith("objects/val/")]
    assert len(images) == 25 + 3 + 34
    assert all(other[name] != expected[name] for name in images)
    render_demo_data(str(tmp_path), sizes=SMALL, seed=0, workers=1)
    assert contents(tmp_path) == expected


def test_an_interrupted_rendering_is_completed(rendered, tmp_path, monkeypatch):
    def interrupt(*args):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Coco, "finish", interrupt)
        with pytest.raises(KeyboardInterrupt):
            render_demo_data(str(tmp_path), sizes=SMALL | {"scenes_test": 40}, workers=1)
    broken = tmp_path / "scenes/images/test/000003.png"
    broken.write_bytes(broken.read_bytes()[:100])
    render_demo_data(str(tmp_path), sizes=SMALL, workers=1)
    assert contents(tmp_path) == contents(rendered)


@pytest.mark.parametrize(
    "arguments, words",
    [
        ({"layout": "yolo"}, ["yolo", "coco", "voc"]),
        ({"sizes": {"scene_train": 5}}, ["scene_train", "scenes_train"]),
        ({"sizes": {"scenes_train": -5}}, ["scenes_train", "-5"]),
        ({"seed": -1}, ["-1"]),
        ({"workers": 0}, ["0 workers"]),
    ],
)
def test_wrong_arguments_are_refused_before_anything_is_written(tmp_path, arguments, words):
    root = tmp_path / "out"
    with pytest.raises(ValueError) as error:
        render_demo_data(str(root), **arguments)
    assert all(word in str(error.value) for word in words)
    assert not root.exists()


def test_a_file_in_the_place_of_the_folder_is_refused(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(NotADirectoryError, match="file is a file"):
        render_demo_data(str(tmp_path / "file"))


def test_the_command_takes_the_sizes_and_shows_progress(rendered, tmp_path, capsys):
    flags = [f"--{name.replace('_', '-')}={size}" for name, size in SMALL.items()]
    main([str(tmp_path), "--layout", "coco", "--seed", "0", "--workers", "2", *flags])
    assert contents(tmp_path) == contents(rendered)
    progress = capsys.readouterr().err
    for name, size in SMALL.items():
        assert (f"Rendering {name}" in progress) == (size > 0)


def test_the_command_says_what_is_wrong_in_one_line(tmp_path, capsys):
    with pytest.raises(SystemExit) as error:
        main([str(tmp_path), "--scenes-train=-1"])
    assert error.value.code == 2
    assert "error: The size of scenes_train is -1" in capsys.readouterr().err.splitlines()[-1]
