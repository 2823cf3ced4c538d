"""The built-in data set: rendered from a seed, with exact annotations; nothing to download."""

from moco_d2.data.synthetic.register import register_demo_datasets
from moco_d2.data.synthetic.sets import SETS
from moco_d2.data.synthetic.writer import render_demo_data

__all__ = ["SETS", "register_demo_datasets", "render_demo_data"]
