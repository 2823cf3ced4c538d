"""The demo from end to end, as small as it can be."""

import json

import cv2

from moco_d2.demo import run_demo

SIZES = {"objects_train": 64, "objects_val": 32, "scenes_train": 8, "scenes_test": 4}
PRETRAIN = "SOLVER.MAX_ITER 3 SOLVER.IMS_PER_BATCH 16 MODEL.BN_GROUP_SIZE 4 LOG_PERIOD 1"
TRANSFER = "SOLVER.MAX_ITER 2 SOLVER.IMS_PER_BATCH 2 SOLVER.STEPS (1,) LOG_PERIOD 1"


def test_demo_measures_what_it_prints(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("DETECTRON2_DATASETS", "elsewhere")  # restored after the demo changed it
    run_demo(
        str(tmp_path),
        [*PRETRAIN.split(), "MODEL.MOCO.QUEUE_SIZE", "32", "DATALOADER.NUM_WORKERS", "0"],
        trials=2,
        sizes=SIZES,
        transfer_options=tuple(TRANSFER.split()),
    )
    results = json.loads((tmp_path / "results.json").read_text())
    assert [row["init"] for row in results["rows"]] == ["random", "MoCo v2"]
    for row, folder in zip(results["rows"], ("random", "moco"), strict=True):
        for trial in (1, 2):
            lines = (tmp_path / f"transfer/{folder}/trial_{trial}/metrics.json").read_text()
            measured = json.loads(lines.splitlines()[-1])["bbox/AP"]
            assert row["AP"]["values"][trial - 1] == measured
        assert 0 <= row["kNN"] <= 100
    out = capsys.readouterr().out
    assert "| initialisation" in out and "results.json" in out
    assert "backbone tensors exported" in out
    for name in ("view_pairs", "pretraining_curves", "detections"):
        picture = cv2.imread(str(tmp_path / f"{name}.png"))
        assert picture is not None and picture.std() > 5, name
        assert f"{name}.png" in out
    # The two runs of an initialisation differ in their seed alone.
    log = (tmp_path / "transfer/moco/trial_2/log.txt").read_text()
    assert "Loaded all" in log and "moco_r18.pkl" in log
