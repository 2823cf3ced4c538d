"""Nearest neighbours as TensorBoard shows them: the right images, framed by label."""

from pathlib import Path

import cv2
import numpy as np
import torch
from pictures import tensorboard_pictures
from support import tiny_pretrain_config

from moco_d2.data.datasets import load_image_index
from moco_d2.engine.trainer import PretrainTrainer
from moco_d2.evaluation.neighbours import draw_neighbours
from moco_d2.visualization.boards import neighbour_board

GREEN, ORANGE = [0, 158, 115], [213, 94, 0]


def folder_of_shades(root, shades):
    """Grey images; those of an even shade are of one class, the others of another."""
    for shade in shades:
        path = root / ("even" if shade % 2 == 0 else "odd") / f"{shade:03d}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        cv2.imwrite(str(path), np.full((32, 32, 3), shade, np.uint8))
    return root


def cells(board, rows, columns, side=32):
    """Of each picture the shade of its centre and the colour of its frame."""
    pitch = side + 2 * (3 + 2)  # frame and gap
    assert board.shape == (3, rows * pitch, columns * pitch)
    found = []
    for row in range(rows):
        tops = [(row * pitch, column * pitch) for column in range(columns)]
        found.append(
            [(board[0, y + 20, x + 20].item(), board[:, y + 3, x + 20].tolist()) for y, x in tops]
        )
    return found


def test_rows_hold_an_image_and_its_nearest_with_frames_by_label(tmp_path):
    shades = [10, 40, 41, 80, 120, 121, 160, 200, 201]
    index = load_image_index([str(folder_of_shades(tmp_path, shades))])
    names = [int(index.path(i)[-7:-4]) for i in range(len(index))]
    # Features on a quarter circle, so that near shades are near.
    angles = torch.tensor(names) / 255 * np.pi / 2
    features = torch.stack([angles.cos(), angles.sin()], dim=1)
    cfg = tiny_pretrain_config(INPUT__VIEWS__SIZE=32)
    board = draw_neighbours(cfg, (index, features, torch.arange(len(names))), None)
    for row in cells(board, rows=8, columns=7):
        shade = row[0][0]
        others = sorted((s for s in names if s != shade), key=lambda s: abs(s - shade))
        distances = [abs(s - shade) for s, _ in row[1:]]
        assert distances == [abs(s - shade) for s in others[:6]]
        for near, frame in row[1:]:
            assert frame == (GREEN if near % 2 == shade % 2 else ORANGE)


def test_the_order_of_channels_is_that_of_the_config():
    images = torch.arange(3, dtype=torch.uint8)[None, :, None, None].expand(1, 3, 8, 8)
    board = neighbour_board(images, images[None], torch.tensor([[True]]), "BGR")
    assert board[:, 8, 8].tolist() == [2, 1, 0] and board[:, 8, 26].tolist() == [2, 1, 0]


def test_evaluations_of_a_run_draw_them_and_look_at_no_more_than_asked(tmp_path):
    images = folder_of_shades(tmp_path / "images", range(20, 60))
    labelled = str(tmp_path / "labelled.csv")  # as good as class folders
    rows = [f"{path.relative_to(tmp_path)},{path.parent.name}" for path in images.rglob("*.png")]
    Path(labelled).write_text("\n".join(["path,label", *sorted(rows)]))
    cfg = tiny_pretrain_config(
        tmp_path / "run",
        MODEL__RESNETS__OUT_FEATURES=["res2"],
        DATASETS__TRAIN=(str(images),),
        DATASETS__TEST=(labelled,),
        TEST__EVAL_PERIOD=2,
        TEST__KNN__TEST_SIZE=10,
        SOLVER__MAX_ITER=4,
    )
    PretrainTrainer(cfg).train()
    pictures = tensorboard_pictures(tmp_path / "run")
    drawn = pictures[f"nearest neighbours in {labelled}"]
    assert list(drawn) == [1, 4]  # the last after the run
    rows = [row for board in drawn.values() for row in cells(board, rows=8, columns=7)]
    assert len({shade for row in rows for shade, _ in row}) <= 10
