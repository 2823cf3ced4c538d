"""Alarms: sentences that a run says once each, also when it is resumed."""

import logging

from detectron2.utils import comm

logger = logging.getLogger(__name__)


class Alarms:
    """Says what is wrong with a run and what to try, each kind once. Checkpoints hold which."""

    def __init__(self):
        self.said: list[str] = []

    def sound(self, kind: str, sentence: str) -> None:
        """Log a warning on the main process, unless one of this kind has been.

        Args:
            kind: of trouble, see docs/monitoring.md.
            sentence: what was seen, with values, and what to try.
        """
        if kind not in self.said:
            self.said.append(kind)
            if comm.is_main_process():
                logger.warning(f"ALARM ({kind}): {sentence}")

    def state_dict(self) -> dict:
        return {"said": self.said}

    def load_state_dict(self, saved: dict) -> None:
        self.said = list(saved["said"])
