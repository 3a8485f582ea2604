"""The data that a run trains on: digests of annotation files and of the list of images."""
from __future__ import annotations

import functools
import hashlib
import os
from collections.abc import Iterable
from typing import Any

from mmengine.dataset import BaseDataset

from .. import seeds
from ..data.dataset_tree import datasets
from ..digests import file_digest, state_digest

MAX_LISTED = 200000  # images whose names are read one by one: beyond, it takes minutes


def file_record(path: str) -> dict[str, Any]:
    """Return size and SHA-256 of a file, or why it cannot be read."""
    try:
        status = os.stat(path)
        return dict(size=status.st_size,
                    sha256=_sha256(path, status.st_size, status.st_mtime_ns, status.st_ino))
    except OSError as error:
        return dict(error=error.strerror or str(error))


@functools.lru_cache(maxsize=64)
def _sha256(path: str, *status: int) -> str:
    """Return the SHA-256 of a file's content, which is read again when its ``status`` changes."""
    with open(path, 'rb') as file:
        return file_digest(file)


def training_data(dataset: Any) -> dict[str, Any]:
    """Return annotation files and image list of a built dataset, for a manifest."""
    annotations: dict[str, Any] = {}
    images: list[str] = []
    for innermost in _innermost(dataset):
        annotations.update((path, file_record(path)) for path in _annotations(innermost))
        root = getattr(innermost, 'data_root', None) or ''
        images += [os.path.relpath(path, root)
                   if root and os.path.isabs(path) == os.path.isabs(root) else path
                   for path in _images(innermost)]
    return dict(samples=len(dataset), annotations=annotations,
                images=dict(count=len(images), sha256=_lines(images)) if images else None)


def training_facts(dataset: Any) -> dict[str, Any]:
    """Return what a resume compares: numbers and strings, whatever folder the data lie in.

    Annotations that are no local file, and images beyond :data:`MAX_LISTED`, are left out.
    """
    facts: dict[str, Any] = dict(train_samples=len(dataset))
    annotations: list[Any] = []
    images: list[str] = []
    entries: list[Any] = []
    with seeds.isolate_rng():  # user datasets may draw random numbers in these calls
        for innermost in _innermost(dataset):
            annotations += [file_record(path).get('sha256') for path in _annotations(innermost)]
            paths = _images(innermost)
            shared = os.path.commonprefix(paths).rfind('/') + 1  # up to the folder of them all
            images += [path[shared:] for path in paths]
        if not images and not annotations:
            entries = [  # without paths
                {name: value for name, value in info.items() if not isinstance(value, str)}
                if isinstance(info, dict) else info
                for innermost in _innermost(dataset) for info in _entries(innermost)]
    if annotations and None not in annotations:
        facts['train_annotations'] = _lines(annotations)[:16]
    if images:
        facts['train_images'] = _lines(images)[:16]
    if entries:
        facts['train_entries'] = state_digest(entries)[:16]
    return facts


def _lines(texts: Iterable[str]) -> str:
    return hashlib.sha256(b''.join(text.encode() + b'\n' for text in texts)).hexdigest()


def _innermost(dataset: Any) -> list[Any]:
    return [inner for inner in datasets(dataset) if len(list(datasets(inner))) == 1]


def _annotations(dataset: Any) -> list[str]:
    path = getattr(dataset, 'ann_file', None)
    return [path] if isinstance(path, str) and path else []


def _images(dataset: Any) -> list[str]:
    """Return the paths of the images in their order."""
    paths = (info.get('img_path') for info in _entries(dataset))
    return [path for path in paths if isinstance(path, str)]


def _entries(dataset: Any) -> list[Any]:
    if not isinstance(dataset, BaseDataset) or len(dataset) > MAX_LISTED:
        return []
    return [dataset.get_data_info(i) for i in range(len(dataset))]
