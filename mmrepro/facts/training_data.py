"""The data that a run trains on: annotation files, the list of images, a sample of the files."""
from __future__ import annotations

import functools
import hashlib
import itertools
import os
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from mmengine.dataset import BaseDataset

from .. import seeds
from ..data.dataset_tree import datasets
from ..objects.digests import file_digest, state_digest
from ..objects.walks import MAX_ITEMS, attributes
from ..util.text import encoded

MAX_LISTED = 200000  # images whose names are read one by one: beyond, it takes minutes
SAMPLED = 1000  # entries of a dataset whose files are looked at: their names and sizes
# the content of so many files is read, and of more while they are small; of a file, its beginning
READ, READ_BYTES, BEGINNING = 16, 8 << 20, 4 << 20


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
    sample = sampled_files(dataset)
    files = dict(count=len(sample), sha256=_lines(_pairs(sample))) if sample else None
    return dict(samples=_count(dataset), annotations=annotations, files=files,
                images=dict(count=len(images), sha256=_lines(images)) if images else None)


def training_facts(dataset: Any) -> dict[str, Any]:
    """Return the facts that a resume compares, numbers and strings, whatever folder the data lie
    in.

    Annotations that are no local file, and images beyond :data:`MAX_LISTED`, are left out.
    """
    count = _count(dataset)
    facts: dict[str, Any] = {} if count is None else dict(train_samples=count)
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
    sample = sampled_files(dataset)
    if sample:
        facts['train_files'] = _lines(_pairs(sample))[:16]
    return facts


def compared_files(dataset: Any) -> dict[str, str]:
    """Return what :func:`sampled_files` does, and size and digest of the annotation files."""
    found = {}
    for number, innermost in enumerate(_innermost(dataset)):
        for path in _annotations(innermost):
            record = file_record(path)
            if 'sha256' in record:
                found[f'dataset {number}: {os.path.basename(path)}'] = (
                    f'{record["size"]} bytes, SHA-256 {record["sha256"][:16]}')
    return {**found, **sampled_files(dataset)}


def sampled_files(dataset: Any) -> dict[str, str]:
    """Return size and, for some, digest of a sample of the files that a dataset names.

    Of each innermost dataset, the same :data:`SAMPLED` entries are looked at in every run and on
    every rank, all entries of a smaller one. Paths that are no local files are left out.
    """
    found: dict[str, str] = {}
    with seeds.isolate_rng():  # user datasets may draw random numbers
        for number, innermost in enumerate(_innermost(dataset)):
            paths = list(dict.fromkeys(path for entry in _sampled_entries(innermost)
                                       for path in _paths(entry)))
            sizes = {path: os.path.getsize(path) for path in paths if os.path.isfile(path)}
            shared = os.path.commonprefix(list(sizes)).rfind('/') + 1  # data may have moved
            total = 0
            for count, (path, size) in enumerate(sizes.items()):
                total += min(size, BEGINNING)
                read = count < READ or total <= READ_BYTES
                found[f'dataset {number}: {path[shared:]}'] = f'{size} bytes' + (
                    f', SHA-256 {_beginning(path)[:16]}' if read else '')
    return found


def _count(dataset: Any) -> int | None:
    """Return the number of samples; None where only the sampler knows it."""
    return len(dataset) if hasattr(type(dataset), '__len__') else None


def _beginning(path: str) -> str:
    with open(path, 'rb') as file:
        return file_digest(file, BEGINNING)


def _sampled_entries(dataset: Any) -> list[Any]:
    if isinstance(dataset, BaseDataset):
        return [_entry(dataset, index) for index in sample_of(len(dataset))]
    # lists of files in a dataset of the user's
    lists = [value for value in attributes(dataset).values()
             if isinstance(value, (list, tuple)) and value]
    return [value[index] for value in lists for index in sample_of(len(value))]


def sample_of(count: int) -> list[int]:
    """Return :data:`SAMPLED` different indices below ``count``, or all; the same in every run."""
    if count <= SAMPLED:
        return list(range(count))
    chosen: dict[int, None] = {}
    numbers = itertools.count()
    while len(chosen) < SAMPLED:
        digest = hashlib.sha256(f'{count} {next(numbers)}'.encode()).digest()
        chosen[int.from_bytes(digest[:8], 'big') % count] = None
    return list(chosen)


def _paths(entry: Any) -> Iterator[str]:
    """Yield the texts in an entry of a dataset that may be paths of files."""
    if isinstance(entry, (str, os.PathLike)):
        yield os.fspath(entry)
    elif isinstance(entry, (list, tuple)) and len(entry) <= MAX_ITEMS:
        for part in entry:
            if isinstance(part, (str, os.PathLike)):
                yield os.fspath(part)
    elif isinstance(entry, dict):
        for name, part in entry.items():
            if isinstance(part, dict):
                yield from _paths(part)
            elif isinstance(part, (str, os.PathLike)) and str(name).endswith(('path', 'file')):
                yield os.fspath(part)


def _pairs(sample: Mapping[str, str]) -> Iterator[str]:
    return (f'{name} {content}' for name, content in sample.items())


def _lines(texts: Iterable[str]) -> str:
    return hashlib.sha256(b''.join(encoded(text) + b'\n' for text in texts)).hexdigest()


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
    return [_entry(dataset, index) for index in range(len(dataset))]


def _entry(dataset: BaseDataset, index: int) -> Any:
    """Return an entry as annotations have it, without calling code of the user's.

    User code may count calls, or open a file whose position later forked workers would share.
    """
    return BaseDataset.get_data_info(dataset, index)
