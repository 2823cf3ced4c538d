"""Configs follow the input convention of weights, and are stopped where they contradict it."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from detectron2.config import CfgNode

from moco_d2.checkpoint import apply_input_convention, convention_of
from moco_d2.checkpoint.convention import CONFIG_KEYS
from moco_d2.engine.configs import flattened
from moco_d2.errors import UserError

Convention = Mapping[str, Any]


def follow_convention(cfg: CfgNode, convention: Convention | None) -> list[str]:
    """Let the convention of MODEL.WEIGHTS decide the input keys of a config, in place.

    Args:
        cfg: not frozen, with MODEL.WEIGHTS.
        convention: what the weights expect; None: not known.

    Returns:
        a note per change, or on why there is none.
    """
    if convention is None:
        return ["input: as the config says; MODEL.WEIGHTS states no convention"]
    if not cfg.INPUT.FOLLOW_WEIGHTS:
        return ["input: as the config says; INPUT.FOLLOW_WEIGHTS is False"]
    changes = apply_input_convention(cfg, convention)
    return [f"{change} (stated by MODEL.WEIGHTS)" for change in changes]


def check_stated_convention(
    cfg: CfgNode,
    config_file: str,
    opts: Sequence[str],
    convention: Callable[[str], Convention | None],
) -> None:
    """Stop a run whose command states another input convention than its weights do.

    What counts as stated is on the command line or in the config file that it names; what this
    file's `_BASE_` says are defaults, which the weights override.

    Args:
        cfg: with the file and the options merged.
        config_file: path of a YAML file, or "".
        opts: keys and values in turn.
        convention: reads what a weight file expects; None: not known.

    Raises:
        UserError: a stated value contradicts MODEL.WEIGHTS, and INPUT.FOLLOW_WEIGHTS is True.
        WeightsError: MODEL.WEIGHTS cannot be read.
    """
    if not cfg.INPUT.FOLLOW_WEIGHTS or not cfg.MODEL.WEIGHTS:
        return
    stated = set(opts[0::2]) | (_keys_in(config_file) if config_file else set())
    stated &= set(CONFIG_KEYS.values())
    expected = convention(cfg.MODEL.WEIGHTS) if stated else None
    if expected is None:
        return
    actual = convention_of(cfg)
    for key, config_key in CONFIG_KEYS.items():
        if config_key in stated and actual[key] != expected[key]:
            raise UserError(
                f"the weights {cfg.MODEL.WEIGHTS} expect {config_key} {expected[key]}, and the "
                f"config says {actual[key]}; leave {config_key} out, or set INPUT.FOLLOW_WEIGHTS "
                "False to use the config's values all the same"
            )


def _keys_in(config_file: str) -> set[str]:
    """The keys that a YAML file itself sets, without those of its `_BASE_`."""
    with open(config_file) as f:
        content = CfgNode.load_cfg(f)
    return set(flattened(content))
