"""Config files, read so that what is wrong with one is said in a sentence; values by full keys."""

import os
from typing import Any

import yaml
from detectron2.config import CfgNode

from moco_d2.errors import UserError


def read_config_file(path: str) -> dict:
    """The content of a YAML config and of its `_BASE_`, as nested dicts.

    Raises:
        FileNotFoundError: the file, or one that it names as `_BASE_`, is not there.
        UserError: it holds no config.
    """
    if not os.path.isfile(path):
        raise FileNotFoundError(f"no config file {path}")
    try:
        content = CfgNode.load_yaml_with_base(path)
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        why = " ".join(str(error).split())
        raise UserError(f"{path} is no config that can be read as YAML: {why}") from error
    if not isinstance(content, dict):
        raise UserError(f"{path} is no config: it holds no KEY: VALUE lines; name a YAML config")
    return content


def merge_config_file_(cfg: CfgNode, path: str) -> None:
    """Merge a config file into a config, in place.

    Raises:
        FileNotFoundError, UserError: see :func:`read_config_file`.
        KeyError, ValueError: it has a key that is not known, or a value of another type.
    """
    read_config_file(path)
    cfg.merge_from_file(path)


def flattened(node: CfgNode, prefix: str = "") -> dict[str, Any]:
    """All values of a config by their full keys, such as MODEL.RESNETS.DEPTH."""
    flat: dict[str, Any] = {}
    for key, value in node.items():
        nested = isinstance(value, CfgNode)
        flat.update(flattened(value, f"{prefix}{key}.") if nested else {prefix + key: value})
    return flat
