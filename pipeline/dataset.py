"""Data sets: from a description to an index, and from a line of the index to a file's bytes."""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from headrace.pipeline.files import Progress
from headrace.pipeline.folder import list_folder, real_root
from headrace.pipeline.index import VERSION, Index, Listing, shown
from headrace.pipeline.listfile import list_file, list_root
from headrace.pipeline.reading import FileSource, Source
from headrace.pipeline.shards import ShardSource, list_shards, shards_root
from headrace.pipeline.spec import Dataset, Decode

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Kind:
    """What a source consists of.

    Attributes:
        root: where the data lies, absolute and without links; raises `DatasetError`.
        listing: walks through it; raises `DatasetError`.
        reader: reads single samples.
    """

    root: Callable[[Dataset], bytes]
    listing: Callable[[Dataset, Progress | None], Listing]
    reader: Callable[[Index, Decode], Source]


#: Sources by the key of `dataset:` that asks for them.
SOURCES: dict[str, Kind] = {
    "folder": Kind(real_root, list_folder, FileSource),
    "list": Kind(list_root, list_file, FileSource),
    "shards": Kind(shards_root, list_shards, ShardSource),
}


def open_source(dataset: Dataset, index: Index, decode: Decode) -> Source:
    """The reader for an index of this data set."""
    return SOURCES[dataset.source].reader(index, decode)


def open_index(
    dataset: Dataset,
    cache_dir: Path,
    *,
    reindex: bool = False,
    progress: Progress | None = None,
) -> Index:
    """The data set's index: the cached one, if nothing has changed since that shows in what it watches, else a new one.

    Where the cache cannot be written the index lies in memory and one of its notices says so. The data set itself is
    never written to.

    Args:
        reindex: build a new one in any case.
        progress: called now and then with (samples done, samples in all; 0 while that is unknown) during a build.

    Raises:
        DatasetError: the data set cannot be listed, or has no samples, or an empty class.
    """
    kind = SOURCES[dataset.source]
    root = kind.root(dataset)
    key = _key(dataset, root)
    file = cache_dir / f"{key[:32]}.index"
    if not reindex and (index := _cached(file, key)):
        return index
    listing = kind.listing(dataset, progress)
    try:
        _refuse_inside(file, dataset)
        return Index.write(listing, file, key)
    except OSError as error:
        reason = f"{shown(os.fsencode(cache_dir))}: {error.strerror or error}"
        listing.notices.append(f"the index is kept in memory only, and built again at each start: {reason}")
        return Index.in_memory(listing, key)


def _cached(file: Path, key: str) -> Index | None:
    index = Index.open(file, key)
    if index is None:
        return None
    if (changed := index.changed()) is None:
        return index
    log.info("%s has changed since the data set was indexed", shown(changed))
    index.close()
    return None


def _refuse_inside(file: Path, dataset: Dataset) -> None:
    """What lies in a folder is its data set; what lies beside the files of a list, or beside tars, is not."""
    if dataset.folder is not None and Path(os.path.realpath(file.parent)).is_relative_to(
        os.path.realpath(dataset.folder)
    ):
        raise OSError("it lies in the data set, which is never written to")


def _key(dataset: Dataset, root: bytes) -> str:
    """Names a listing: another root, or other options, is another listing."""
    options = dataset.plain() | {"root": root.hex(), "version": VERSION}
    if dataset.source == "folder":
        options["folder"] = "root"  # whichever way leads to it
    return hashlib.sha256(json.dumps(options, sort_keys=True).encode("ascii")).hexdigest()
