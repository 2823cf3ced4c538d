"""Curves show what metrics.json holds, of several runs, resumed ones, and broken files."""

import json
import re
import runpy
from html.parser import HTMLParser
from pathlib import Path

import pytest
from detectron2.utils.events import EventStorage, JSONWriter
from matplotlib import pyplot as plt

from moco_d2.errors import UserError
from moco_d2.visualization.curves import choose_panels, draw_curves
from moco_d2.visualization.metrics import read_metrics, read_runs
from moco_d2.visualization.style import colour, dashes

main = runpy.run_path(str(Path(__file__).parents[2] / "tools/plot_metrics.py"))["main"]


def write_run(folder: Path, loss: dict[int, float], chance: float = 3.0) -> Path:
    """As a pretraining writes it: a line per period, evaluations on lines of their own."""
    folder.mkdir(parents=True)
    with open(folder / "metrics.json", "w") as f:
        for iteration, value in loss.items():
            line = {"iteration": iteration, "total_loss": value, "[metric]chance_level": chance}
            line |= {"lr": 0.1 / (iteration + 1), "[metric]contrastive_acc1": 10 * value}
            f.write(json.dumps(line) + "\n")
        f.write(json.dumps({"iteration": iteration, "knn/top1": 40.0, "knn/top5": 70.0}) + "\n")
        f.write(json.dumps({"iteration": iteration + 1, "bbox/AP": float("nan")}) + "\n")
    return folder


@pytest.fixture
def two_runs(tmp_path) -> list[Path]:
    return [
        write_run(tmp_path / "a/first/pretrain", {9: 3.5, 19: 2.5, 29: 2.25}),
        write_run(tmp_path / "b/second/pretrain", {9: 4.0, 19: 3.75}, chance=4.5),
    ]


def lines_of(figure) -> dict[str, list[list[tuple[float, float]]]]:
    """What is drawn, by the title of its panel."""
    return {
        axis.get_title(loc="left"): [
            list(zip(*line.get_data(), strict=True)) for line in axis.lines
        ]
        for axis in figure.axes
    }


def test_the_points_drawn_are_those_of_the_files(two_runs):
    figure = draw_curves(read_runs([str(folder) for folder in two_runs]))
    drawn = lines_of(figure)
    assert drawn["loss"] == [
        [(9, 3.5), (19, 2.5), (29, 2.25)],
        [(9, 4.0), (19, 3.75)],
        [(9, 3.0), (19, 3.0), (29, 3.0)],
        [(9, 4.5), (19, 4.5)],
    ]
    assert drawn["contrastive accuracy (%)"][0] == [(9, 35.0), (19, 25.0), (29, 22.5)]
    assert drawn["kNN accuracy (%)"] == [[(29, 40.0)], [(19, 40.0)], [(29, 70.0)], [(19, 70.0)]]
    legend = [text.get_text() for text in figure.legends[0].get_texts()]
    assert legend == ["first", "second"]
    loss = figure.axes[0].lines
    assert loss[0].get_color() != loss[1].get_color()
    assert loss[2].get_color() == loss[0].get_color()  # chance levels differ: each is its run's
    plt.close(figure)


def test_a_chance_level_that_is_the_same_for_all_runs_belongs_to_none(tmp_path):
    for name in ("a", "b"):
        write_run(tmp_path / name, {9: 2.0})
    figure = draw_curves(read_runs([str(tmp_path)]))
    colours = {line.get_color() for line in figure.axes[0].lines}
    assert len(colours) == 3
    plt.close(figure)


def test_where_iterations_go_back_the_later_attempt_counts(tmp_path):
    path = tmp_path / "metrics.json"
    attempts = [(0, 1.0), (10, 2.0), (20, 3.0), (30, 4.0), (10, 5.0), (20, 6.0)]
    lines = [json.dumps({"iteration": i, "total_loss": loss}) + "\n" for i, loss in attempts]
    path.write_text("".join(lines) + '{"iteration": 20, "knn/top1": 7.0}\n{"iteration": 3')
    assert read_metrics(path) == [
        {"iteration": 0, "total_loss": 1.0},
        {"iteration": 10, "total_loss": 5.0},
        {"iteration": 20, "total_loss": 6.0, "knn/top1": 7.0},
    ]


def test_a_line_may_come_after_that_of_a_later_iteration(tmp_path):
    """detectron2's writer, with an evaluation every 50 and monitors every 30 iterations."""
    path = tmp_path / "metrics.json"
    with EventStorage() as storage:
        writer = JSONWriter(str(path), window_size=1)
        for iteration in range(120):
            storage.iter = iteration
            storage.put_scalar("total_loss", iteration / 4)
            if iteration % 30 == 29:
                storage.put_scalar("[metric]feature_std", iteration / 8)
            if iteration % 50 == 49:
                storage.put_scalar("knn/top1", iteration / 2, smoothing_hint=False)
            if iteration % 20 == 19:
                writer.write()
        writer.close()
    written = [json.loads(line)["iteration"] for line in path.read_text().splitlines()]
    assert written != sorted(written)
    records = {r.pop("iteration"): r for r in read_metrics(path)}
    assert list(records) == sorted(records)
    assert {i: r["total_loss"] for i, r in records.items() if "total_loss" in r} == {
        i: i / 4 for i in range(19, 120, 20)
    }
    found = {
        name: {i for i, r in records.items() if name in r} for name in records[59] | records[99]
    }
    assert found["knn/top1"] == {49, 99} and found["[metric]feature_std"] == {29, 59, 89, 119}


def test_runs_below_a_folder_that_have_written_nothing_are_left_out(two_runs, tmp_path):
    (tmp_path / "a/begun").mkdir()
    (tmp_path / "a/begun/metrics.json").touch()
    assert [run.name for run in read_runs([str(tmp_path)])] == ["first", "second"]
    with pytest.raises(UserError, match="begun/metrics.json is empty"):
        read_runs([str(tmp_path / "a/begun"), str(two_runs[1])])


def test_runs_are_called_by_what_tells_them_apart(two_runs, tmp_path):
    def names(*texts: str) -> list[str]:
        return [run.name for run in read_runs(texts)]

    first, second = map(str, two_runs)
    assert names(first) == ["pretrain"]
    assert names(first, second) == names(str(tmp_path)) == ["first", "second"]
    assert names(first, f"{second}/metrics.json") == ["first", "second"]
    assert names(f"m 0.99={first}", second) == ["m 0.99", "pretrain"]
    write_run(tmp_path / "c/first/pretrain", {9: 1.0})
    assert names(str(tmp_path)) == ["a/first", "second", "c/first"]
    with pytest.raises(UserError, match="several runs are called 'x'"):
        read_runs([f"x={first}", f"x={second}"])


def test_of_several_test_sets_each_has_a_panel(tmp_path):
    write_run(tmp_path / "a", {9: 2.0})
    with open(tmp_path / "a/metrics.json", "a") as f:
        for name, value in (("birds", 30.0), ("cars", 20.0)):
            f.write(json.dumps({"iteration": 9, f"{name}/knn/top1": value}) + "\n")
    figure = draw_curves(read_runs([str(tmp_path / "a")]))
    drawn = lines_of(figure)
    assert drawn["kNN accuracy (%), birds"] == [[(9, 30.0)]]
    assert drawn["kNN accuracy (%), cars"] == [[(9, 20.0)]]
    assert not any("training images (%), " in title for title in drawn)
    plt.close(figure)


def test_chosen_metrics_have_a_panel_each(two_runs):
    runs = read_runs([str(two_runs[0])])
    assert [panel.title for panel in choose_panels(runs, ["lr", "knn/*"])] == [
        "lr",
        "knn/top1",
        "knn/top5",
    ]
    with pytest.raises(UserError, match="no run has a metric 'los'; there are: bbox/AP, .*lr"):
        choose_panels(runs, ["los"])


class Page(HTMLParser):
    """Values and addresses of a page."""

    def __init__(self, text: str):
        super().__init__()
        self.values, self.addresses, self.figures = [], [], 0
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.figures += tag == "figure"
        for name, value in attributes:
            if tag == "data" and name == "value":
                self.values.append(float(value))
            if name in ("src", "href") and not value.startswith(("#", "data:")):
                self.addresses.append(value)


def test_the_tool_writes_a_picture_and_a_page_that_holds_all(two_runs, tmp_path, capsys):
    runs = ["<i>$a$ & b=" + str(two_runs[0]), str(two_runs[1])]
    assert main([*runs, "--output", str(tmp_path / "c.png")]) == 0
    assert plt.imread(tmp_path / "c.png").shape[2] == 4
    assert main([*runs, "--output", str(tmp_path / "c.html")]) == 0
    text = (tmp_path / "c.html").read_text()
    page = Page(text)
    assert page.figures == 5 and page.addresses == []
    assert "http://" not in text and "https://" not in text and "<i>" not in text
    # By run: iteration, loss, accuracies and lr; an AP that is not a number is left out.
    assert page.values == [30, 2.25, 22.5, 40.0, 0.1 / 30, 20, 3.75, 37.5, 40.0, 0.1 / 20]
    assert len(re.findall(r"&lt;i&gt;\$a\$ &amp; b", text)) > 5  # in plots and tables
    assert "2.25" in capsys.readouterr().out


@pytest.mark.parametrize(
    "content, said",
    [
        (None, "there is no metrics.json in"),
        ("", "is empty"),
        ('{"iteration": 1, "lr": 1}\n[1]\n{"iteration": 2}\n', "line 2 of"),
        ('{"lr": 1}\n', "line 1 of"),
        ("\x89PNG\n\n", "line 1 of"),
    ],
)
def test_missing_and_broken_files_are_one_sentence(tmp_path, capsys, content, said):
    if content is not None:
        (tmp_path / "metrics.json").write_text(content)
    assert main([str(tmp_path), "--output", str(tmp_path / "c.png")]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and said in error and str(tmp_path) in error
    assert not (tmp_path / "c.png").exists()


def test_other_endings_are_refused(tmp_path, capsys):
    assert main([str(tmp_path), "--output", "curves.pdf"]) == 2
    assert "neither .png nor .html" in capsys.readouterr().err


def test_many_series_are_told_apart_and_only_the_first_is_grey():
    looks = [(colour(i), dashes(i)) for i in range(19)]
    assert len(set(looks)) == 19
    assert [i for i, (c, _) in enumerate(looks) if c == colour(0)] == [0]
