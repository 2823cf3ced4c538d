"""README and docs name only what is there: config keys with their defaults, files, commands."""

import ast
import re
from pathlib import Path

import pytest
from detectron2.config import CfgNode, get_cfg

from moco_d2 import add_moco_config
from moco_d2.checkpoint.table import FORMATS

ROOT = Path(__file__).parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])


def flatten(cfg: CfgNode, prefix: str = "") -> dict[str, object]:
    flat = {}
    for key, value in cfg.items():
        nested = isinstance(value, CfgNode)
        flat.update(flatten(value, f"{prefix}{key}.") if nested else {prefix + key: value})
    return flat


def test_every_config_key_is_documented_with_its_default():
    before, cfg = flatten(get_cfg()), get_cfg()
    add_moco_config(cfg)
    added = {key: value for key, value in flatten(cfg).items() if key not in before}
    page = (ROOT / "docs/pretraining.md").read_text()
    rows = re.findall(r"^\| `([A-Z0-9_.]+)` \| `?(.+?)`? \|", page, re.MULTILINE)
    documented = {key: ast.literal_eval(default) for key, default in rows}
    assert documented == added


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_that_a_page_names_are_there(page):
    text = page.read_text()
    named = re.findall(r"\b(?:configs|tools)/[\w/-]+\.(?:yaml|py)\b", text)
    missing = [name for name in named if not (ROOT / name).is_file()]
    links = re.findall(r"\]\((?!https?://)([^)#]+)", text)
    missing += [link for link in links if not (page.parent / link).is_file()]
    assert missing == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_config_keys_in_a_pages_commands_exist(page):
    cfg = get_cfg()
    add_moco_config(cfg)
    known = flatten(cfg)
    commands = re.findall(r"tools/train_net\.py(?:[^\n]|\\\n|\n {4})*", page.read_text())
    keys = [key for command in commands for key in re.findall(r"\s([A-Z][A-Z0-9_.]+)\s", command)]
    assert [key for key in keys if key not in known] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_make_targets_that_a_page_names_exist(page):
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    commands = re.compile(r"(?:^|`)make (?:[A-Z]+=[^\s`]+ )?([a-z]+)", re.MULTILINE)
    assert set(commands.findall(page.read_text())) <= targets


def test_every_weight_format_is_in_the_table_of_public_weights():
    page = (ROOT / "docs/weights.md").read_text()
    table = page.partition("## Public weights")[2].partition("\n## ")[0]
    assert [name for name in FORMATS if f"`{name}`" not in table] == []
    options = set(re.findall(r"(?<!-)--[a-z][a-z0-9-]+", page))
    sources = ("tools/convert_weights.py", "moco_d2/checkpoint/arguments.py")
    known = "".join((ROOT / source).read_text() for source in sources)
    assert [o for o in options if o not in known and not o.startswith("--pixel-")] == []
