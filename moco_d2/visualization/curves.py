"""Curves of a pretraining run, from its metrics.json."""

import json

import matplotlib

matplotlib.use("Agg")  # files only, so that no display is needed
from matplotlib import pyplot as plt

# Title of a panel -> what is drawn in it: key of metrics.json, label, style.
_PANELS = {
    "InfoNCE loss": [
        ("loss_contrastive", "loss", "-"),
        ("[metric]chance_level", "chance", ":"),
    ],
    "contrastive accuracy (%)": [
        ("[metric]contrastive_acc1", "top 1", "-"),
        ("[metric]contrastive_acc5", "top 5", "--"),
    ],
    "learning rate": [("lr", "lr", "-")],
}


def read_metrics(path: str) -> list[dict[str, float]]:
    """One dict per written iteration, by iteration; a resumed run's later values win."""
    records: dict[int, dict[str, float]] = {}
    with open(path) as f:
        for line in f:
            record = json.loads(line)
            records.setdefault(record["iteration"], {}).update(record)
    return [records[iteration] for iteration in sorted(records)]


def draw_pretraining_curves(metrics: str, path: str) -> None:
    """Draw loss beside its chance level, contrastive accuracy, and learning rate.

    Args:
        metrics: path of a run's metrics.json.
        path: of the PNG.
    """
    records = read_metrics(metrics)
    figure, axes = plt.subplots(1, len(_PANELS), figsize=(13, 3.6), constrained_layout=True)
    for axis, (title, lines) in zip(axes, _PANELS.items(), strict=True):
        for key, label, style in lines:
            points = [(r["iteration"], r[key]) for r in records if key in r]
            axis.plot(*zip(*points, strict=True), style, label=label)
        axis.set_title(title)
        axis.set_xlabel("iteration")
        axis.set_ylim(bottom=0)
        axis.grid(alpha=0.3)
        axis.legend()
    figure.savefig(path, dpi=110)
    plt.close(figure)
