"""Errors of code that loads data, in one line: which dataset, index, file and transform.

The exception of stock code stays the cause of the error.
"""
from __future__ import annotations

import os
import sys
import traceback
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

from torch.utils.data import DataLoader, Sampler

from ..errors import DatasetError, MMReproError, SampleError
from ..util.libraries import is_own
from ..util.scoped import replaced
from ..util.text import class_name, counted, listed
from . import dataset_tree

_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
# transform, part of its error message -> meaning
_MEANINGS = {('LoadAnnotations', "KeyError: 'mask'"):
             'an annotation has no segmentation, or an empty one',
             ('LoadImageFromFile', '!buf.empty()'): 'the file is empty'}


def _frames(error: BaseException) -> list[tuple[Any, int]]:
    return list(traceback.walk_tb(error.__traceback__))


def summary(error: BaseException) -> str:
    """Return class and message of an exception, in one line."""
    text = ' '.join(str(error).split())
    return f'{type(error).__name__}: {text}' if text else type(error).__name__


def where_raised(error: BaseException) -> str:
    """Return file and line of the innermost code of the user, else of the innermost code."""
    places = [(frame.f_code.co_filename, line) for frame, line in _frames(error)]
    own = [place for place in places if os.path.isabs(place[0]) and is_own(place[0])
           and not place[0].startswith(_PACKAGE + os.sep)]
    file, line = (own or places)[-1]
    return f'{file if own else os.path.basename(file)}, line {line}'


def sample_error(dataset: Any, index: Any, error: Exception) -> SampleError:
    """Return the error of a sample that could not be loaded."""
    known = {id(transform) for transform in dataset_tree.pipelines(dataset)}
    transform, file = '', ''
    for frame, _ in _frames(error):
        if id(frame.f_locals.get('self')) in known:
            transform = type(frame.f_locals['self']).__name__
        for value in [*frame.f_locals.values()]:
            if isinstance(value, dict) and isinstance(value.get('img_path'), str):
                file = value['img_path']
    what = summary(error)
    meaning = next((meaning for (name, part), meaning in _MEANINGS.items()
                    if name == transform and part in what), None)
    if what.startswith('Exception: Cannot find valid image'):
        meaning = _rejecting_transform(dataset, index)
    details = [f'file {file}'] if file and file not in what else []
    details += [meaning] if meaning else []
    return SampleError(
        f'sample {index} of {_names(dataset)} cannot be loaded: '
        f'{transform + " raised " if transform else ""}{what} '
        f'({"; ".join([*details, where_raised(error)])})')


# part of the error message of a collate function -> meaning
_OF_BATCHES = {
    'each data_itement in list of batch': 'the samples are no data samples: end the pipeline with '
                                          'PackDetInputs, or give the loader a collate_fn',
    'expects each tensor to be equal size': 'the samples have different sizes: pad or resize them '
                                            "in the pipeline, or use dict(type='pseudo_collate')"}


def batch_error(dataset: Any, indices: Sequence[Any], function: str, error: Exception
                ) -> SampleError:
    """Return the error of samples that a collate function could not put together."""
    what = summary(error)
    details = [meaning for part, meaning in _OF_BATCHES.items() if part in what]
    return SampleError(
        f'samples {listed([*map(str, indices)], 8)} of {_names(dataset)} cannot be put together '
        f'as a batch: {function.rpartition(".")[2]} raised {what} '
        f'({"; ".join([*details, where_raised(error)])})')


def _names(dataset: Any) -> str:
    return ' of '.join(type(asked).__name__ for asked in dataset_tree.datasets(dataset))


def _rejecting_transform(dataset: Any, index: Any) -> str | None:
    """Return which transform returns None for a sample; a dataset then takes other samples."""
    try:
        results = dataset.get_data_info(index)
        for transform in dataset.pipeline.transforms:
            results = transform(results)
            if results is None:
                return f'{type(transform).__name__} returned None'
    except Exception:  # whatever code of the user raises while it is asked once more
        return None
    return None


class _Annotations:
    """Facts on the COCO files that were read for the datasets of a loader."""

    def __init__(self) -> None:
        self.categories: dict[str, None] = {}
        self.repeated: Counter[Any] = Counter()  # ids of images that occur more than once
        self.unknown: Counter[Any] = Counter()  # ids of categories that no category has

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Look at each file that is read in the block."""
        api = getattr(sys.modules.get('pycocotools.coco'), 'COCO', None)
        if api is None:
            yield
            return
        stock = api.createIndex

        def create_index(coco: Any) -> Any:
            result = stock(coco)
            self.categories.update((str(category['name']), None) for category in coco.dataset.get(
                'categories', ()))
            known = {category['id'] for category in coco.dataset.get('categories', ())}
            self.unknown.update(
                annotation['category_id'] for annotation in coco.dataset.get('annotations', ())
                if 'category_id' in annotation and annotation['category_id'] not in known)
            images = coco.dataset.get('images', ())
            if len(images) > len(coco.imgs):
                self.repeated.update({image: count for image, count in Counter(
                    entry['id'] for entry in images).items() if count > 1})
            return result

        with replaced(api, createIndex=create_index):
            yield

    def without_category(self) -> str:
        """Return which annotations belong to no category, or ''."""
        if not self.unknown:
            return ''
        count = sum(self.unknown.values())
        return (f'{counted(count, "annotation")} with a category_id that no category has: '
                f'{listed([*map(str, self.unknown)], 5)}')

    def missing(self, dataset: Any) -> str:
        """Return which classes of a dataset are no categories of the files, or ''."""
        classes = (getattr(dataset, 'metainfo', None) or {}).get('classes') or ()
        missing = [str(name) for name in classes if str(name) not in self.categories]
        if not missing or not self.categories:
            return ''
        return (f'{len(missing)} of {len(classes)} classes in metainfo are not among the '
                f'categories of its annotations: {listed(missing)}; these have '
                f'{listed([*self.categories], 10)}')


@contextmanager
def naming_dataset(argument: str, loader: Any, warn: Any, watch: bool) -> Iterator[list[Any]]:
    """Build the dataset of a loader in this block, and append it to the list that it gets.

    Args:
        argument: of the runner, such as ``'train_dataloader'``.
        loader: its value, a dict.
        warn: called with a line for what stock code passes over.
        watch: look at COCO files while they are read.

    Raises:
        DatasetError: stock code has raised; names argument, dataset and file.
    """
    annotations = _Annotations()
    built: list[Any] = []
    try:
        with annotations.watched() if watch else nullcontext():
            yield built
    except (MMReproError, FileNotFoundError):
        raise
    except Exception as error:
        if isinstance(error, KeyError) and 'registry' in str(error):
            raise  # names the class and the registry
        raise DatasetError(_not_built(argument, loader, annotations, error)) from error
    for dataset in (part for whole in built for part in dataset_tree.datasets(whole)):
        problem = annotations.missing(dataset) if hasattr(dataset, 'cat_ids') else ''
        if problem:
            warn(f'{argument}: {type(dataset).__name__}: {problem}')
    if annotations.unknown:
        warn(f'{argument}: {annotations.without_category()}')
    if annotations.repeated:
        ids = listed([str(image) for image in annotations.repeated])
        warn(f'{argument}: images with the same id ({ids}): of each, the last is used only')


def _not_built(argument: str, loader: Any, annotations: _Annotations, error: Exception) -> str:
    kind = loader.get('dataset') if isinstance(loader, dict) else None
    name = class_name(kind.get('type')) if isinstance(kind, dict) else 'its dataset'
    file, annotation, empty = '', '', None
    for frame, _ in _frames(error):
        owner = frame.f_locals.get('self')
        # the dataset is built by then; the second is a variable of MMEngine's build_dataloader()
        if isinstance(owner, (DataLoader, Sampler)) or 'sampler_cfg' in frame.f_locals:
            return f'{argument} cannot be built: {summary(error)} ({where_raised(error)})'
        if hasattr(type(owner), '__getitem__') and hasattr(owner, 'ann_file'):
            name, file = type(owner).__name__, str(owner.ann_file)
            if frame.f_code.co_name == '_serialize_data' and not owner.data_list:
                empty = owner
        for value in [*frame.f_locals.values()]:
            if isinstance(value, dict) and {'id', 'image_id'} <= set(value):
                annotation = f': annotation {value["id"]} of image {value["image_id"]}'
    whose = f'{argument}: {name} ({file})' if file else f'{argument}: {name}'
    if empty is not None:
        why = annotations.missing(empty) or annotations.without_category() or (
            'the file lists none, or filter_cfg and indices leave none')
        return f'{whose} has no sample: {why}'
    return f'{whose} cannot be loaded{annotation}: {summary(error)} ({where_raised(error)})'
