"""How many images of a data set cannot be read, and when that is too many."""

import logging
from collections.abc import Sequence

from moco_d2.errors import UserError

logger = logging.getLogger(__name__)


class UnreadableImages:
    """Counts the distinct unreadable images, names each in the log once, and sets the limit."""

    def __init__(self, num_images: int, limit: float = 0.01):
        """
        Args:
            num_images: N, images in the data set.
            limit: largest share of them that may be unreadable.
        """
        if not 0 <= limit <= 1:
            raise UserError(
                f"DATALOADER.MAX_UNREADABLE is {limit:g}: it must be a share of the images, 0 to 1."
            )
        self._limit = limit
        self._num_images = num_images
        self._reasons: dict[str, str] = {}

    def __len__(self) -> int:
        return len(self._reasons)

    def update(self, unreadable: Sequence[tuple[int, str, str]]) -> None:
        """Count and log images not met before, as (index, path, reason)."""
        for _, path, reason in unreadable:
            if path not in self._reasons:
                self._reasons[path] = reason
                logger.warning(
                    f"Unreadable image left out: {path} ({reason}). "
                    f"So far {len(self)} of {self._num_images}."
                )

    def check(self, images_seen: int) -> None:
        """Stop when more of what was seen is unreadable than the limit.

        One file never stops a run, nor do fewer than 100 before they are that share of the data
        set.

        Args:
            images_seen: images asked for since the start, repetitions included.

        Raises:
            UserError: too many are unreadable. It names five of them.
        """
        seen = min(images_seen, self._num_images)
        if len(self) <= max(1, self._limit * seen):
            return
        if len(self) >= 100 or len(self) > max(1, self._limit * self._num_images):
            shown = "; ".join(f"{p} ({r})" for p, r in list(self._reasons.items())[:5])
            raise UserError(
                f"{len(self)} of {seen} images cannot be read, more than {self._limit * 100:g} %: "
                f"repair or remove them, or raise DATALOADER.MAX_UNREADABLE. Among them {shown}."
            )
