"""How plots look: colours told apart by all eyes on light and dark pages, and SVG for the page."""

import io
import re

import matplotlib

matplotlib.use("Agg")  # files only, so that no display is needed
from matplotlib import pyplot as plt
from matplotlib.figure import Figure

# (On a light page, on a dark page), told apart by colour-blind eyes (after Okabe and Ito). A plot's
# SVG calls them var(--series-N), and PNGs have the first of each.
COLOURS = (
    ("#7d7d7d", "#a3a3a3"),
    ("#0072b2", "#4fb0e8"),
    ("#d55e00", "#f58a45"),
    ("#009e73", "#2fc79b"),
    ("#a8578a", "#dd93bf"),
    ("#b8860b", "#e3b341"),
    ("#5b5bd6", "#9a9aff"),
)
INK = "#1f2328"
STYLE = {
    "font.size": 9.5,
    "axes.edgecolor": INK,
    "axes.labelcolor": INK,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "text.color": INK,
    "text.parse_math": False,  # names of users hold dollars, too
    "xtick.color": INK,
    "ytick.color": INK,
    "svg.fonttype": "none",
    "svg.hashsalt": "moco_d2",
}


def colour(i: int) -> str:
    """Of series i: grey for the first, which the others are compared with, and for no other."""
    return COLOURS[i and 1 + (i - 1) % (len(COLOURS) - 1)][0]


def dashes(i: int) -> str:
    """Line style of series i: another for every round of colours."""
    return ("-", "--", ":")[max(i - 1, 0) // (len(COLOURS) - 1) % 3]


def to_svg(figure: Figure, prefix: str) -> str:
    """A figure as an SVG element that takes its colours and font from the page around it.

    Args:
        prefix: of its ids, which must be unique in a page.
    """
    stream = io.StringIO()
    with plt.rc_context(STYLE):
        figure.savefig(stream, format="svg", transparent=True, metadata={"Date": None})
    svg = stream.getvalue()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>\s*", "", svg, flags=re.DOTALL)
    svg = re.sub(r"<!--.*?-->\s*", "", svg, flags=re.DOTALL)
    svg = re.sub(r'\s(xmlns(:\w+)?|version|width|height)="[^"]*"', "", svg, count=5)
    svg = svg.replace("xlink:href", "href")
    used = set(re.findall(r'(?:href="|url\()#([\w-]+)', svg))
    svg = re.sub(
        r'\sid="([^"]+)"',
        lambda match: f' id="{prefix}-{match[1]}"' if match[1] in used else "",
        svg,
    )
    svg = re.sub(r'(href="|url\()#', rf"\1#{prefix}-", svg)
    svg = re.sub(r"(font: [^;\"]*?px) [^;\"]*", r"\1 var(--font)", svg)
    svg = svg.replace(INK, "currentColor")
    for i, (light, _) in enumerate(COLOURS):
        svg = svg.replace(light, f"var(--series-{i})")
    return svg
