#!/usr/bin/env python
"""Draw the curves of one or several runs, finished or not, and print their last values.

    tools/plot_metrics.py output/moco_pretrain
    tools/plot_metrics.py output/moco_pretrain output/other --output curves.html
    tools/plot_metrics.py "m 0.99=output/a" "m 0.999=output/b/metrics.json"    names of your own
    tools/plot_metrics.py output/ablation                     all runs below a folder
    tools/plot_metrics.py output/voc --metrics "bbox/AP*"     what is not drawn by itself

A file that ends in .png is one picture of all curves, one that ends in .html a page that holds
everything it shows. Values are those of metrics.json, which are medians over LOG_PERIOD
iterations.
"""

import argparse
import sys
from pathlib import Path

from matplotlib import pyplot as plt
from tabulate import tabulate

from moco_d2.errors import UserError
from moco_d2.visualization.curves import choose_panels, draw_curves
from moco_d2.visualization.curves_page import curves_page, last_values
from moco_d2.visualization.metrics import read_runs


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", nargs="+", metavar="RUN", help="a run's folder; NAME=FOLDER")
    parser.add_argument(
        "--output", default="curves.png", metavar="FILE", help=".png or .html (default: curves.png)"
    )
    parser.add_argument("--metrics", nargs="+", default=[], metavar="NAME", help="draw these")
    args = parser.parse_args(argv)
    output = Path(args.output)
    try:
        if output.suffix not in (".png", ".html"):
            raise UserError(f"--output {output} ends in neither .png nor .html: name such a file")
        runs = read_runs(args.runs)
        panels = choose_panels(runs, args.metrics)
        if output.suffix == ".html":
            output.write_text(curves_page(runs, panels), encoding="utf-8")
        else:
            figure = draw_curves(runs, panels)
            figure.savefig(output, dpi=140, facecolor="white")
            plt.close(figure)
    except (UserError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    table = last_values(runs, panels)
    rows = [[entry.text for entry in row] for row in table.rows]
    print(tabulate(rows, table.columns, tablefmt="github", disable_numparse=True))
    print(f"\n{output}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
