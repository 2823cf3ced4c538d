"""Tar shards of images in WebDataset's layout, read in place.

A sample is the members that share a name up to the first dot of its last part; of them, images and
a class number in ``.cls`` are used. The index holds where each image begins in its shard, so that a
run may read any image at any time, as from a folder.
"""

import logging
import os
import tarfile
import time
from collections.abc import Sequence

from detectron2.utils.file_io import PathManager

from moco_d2.data.folders import PROGRESS, is_image_name
from moco_d2.data.index import ImageIndex, IndexBuilder
from moco_d2.data.index_cache import Stamps, cached_scan, stamp
from moco_d2.errors import UserError

logger = logging.getLogger(__name__)


def read_shards(name: str, paths: Sequence[str]) -> ImageIndex:
    """Index tar files; their lists of members are kept, see :func:`cached_scan`.

    Args:
        name: what the config calls them.
        paths: of uncompressed tar files, local or whatever PathManager can make local.

    Returns:
        Their images in the order in which they are stored.

    Raises:
        FileNotFoundError: they hold no image.
        UserError: not a tar file, or a compressed one.
    """
    locals_ = [PathManager.get_local_path(path) for path in paths]
    index = cached_scan(name, locals_, lambda: _scan(paths, locals_))
    if not len(index):
        raise FileNotFoundError(f"{name!r} holds no image: name other shards.")
    return index


def _scan(paths: Sequence[str], locals_: Sequence[str]) -> tuple[ImageIndex, Stamps]:
    stamps = [stamp(local) for local in locals_]
    builder, highest = IndexBuilder(), -1
    shown = time.monotonic()
    for number, (path, local) in enumerate(zip(paths, locals_, strict=True), 1):
        highest = max(highest, _add_shard(builder, path, local))
        if time.monotonic() - shown > PROGRESS:
            shown = time.monotonic()
            logger.info(f"Scanned {number} of {len(paths)} shards, {len(builder)} images so far")
    return builder.finish([str(label) for label in range(highest + 1)]), stamps


def _add_shard(builder: IndexBuilder, path: str, local: str) -> int:
    """Add the images of one shard. Returns the highest label in it, -1 without labels."""
    images, labels = [], {}
    try:
        with tarfile.open(local, "r:") as shard:
            for member in shard:
                if not member.isfile() or os.path.basename(member.name).startswith("."):
                    continue
                key = _sample_key(member.name)
                if is_image_name(member.name):
                    images.append((key, member.name, member.offset_data, member.size))
                elif member.name == f"{key}.cls":
                    labels[key] = int(shard.extractfile(member).read())
    except (tarfile.ReadError, ValueError) as error:
        raise UserError(
            f"The shard {path!r} cannot be read in place ({error}): it must be a whole, "
            "uncompressed tar file."
        ) from error
    for key, name, offset, size in images:
        builder.add_member(path, name, offset, size, labels.get(key, -1))
    return max(labels.values(), default=-1)


def _sample_key(name: str) -> str:
    folder, slash, base = name.rpartition("/")
    return folder + slash + base.split(".", 1)[0]
