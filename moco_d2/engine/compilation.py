"""torch.compile for the encoders, where the machine can compile."""

import logging

import torch
from torch import nn

from moco_d2.modeling.encoder import Encoder

logger = logging.getLogger(__name__)


def compile_encoders_(model: nn.Module) -> bool:
    """Compile a model's encoders in place; names of parameters and buffers stay.

    Args:
        model: with encoders as children, and `device`.

    Returns:
        whether it was done. Where a trial compilation fails (no C++ compiler, a Python that
        torch.compile does not know), one warning says why and the model stays as it is.
    """
    try:
        torch.compile(_trial)(torch.zeros(8, device=model.device))
    except Exception as error:  # as many kinds as there are reasons
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        logger.warning(
            f"MODEL.COMPILE: torch.compile does not work here, going on without: {reason}"
        )
        return False
    for child in model.children():
        if isinstance(child, Encoder):
            child.compile()
    return True


def _trial(x: torch.Tensor) -> torch.Tensor:
    return x.sin() + 1
