"""Record what every transform of the data pipeline makes of a sample, in the process that loads it.

Transforms get a subclass of their own class, so that whoever asks for their type, name or
attributes finds what was there.
"""
from __future__ import annotations

import hashlib
import os
import sys
from contextlib import contextmanager
from typing import Any, Callable, Dict, FrozenSet, Iterator, List, Optional, Tuple

import numpy as np
import torch
from mmengine.structures import BaseDataElement

from ..data.batch_context import current_batch
from ..fingerprint import generator_states
from ..fingerprint.records import ATTRIBUTE, GLOBAL, Record, append_record, read_records

__all__ = ['Samples', 'content_digest', 'leaves', 'read_samples']

VALUE_TEXT = 80  # characters of a plain value that a transform keeps
_recorded: Dict[type, type] = {}
# of the sample that this process loads: its name, transforms so far; samples loaded so far
_current: Optional[str] = None
_number = 0
_loaded = 0


class Samples:
    """Where the transforms write to; it travels into worker processes with the data set.

    Args:
        folder: of the files, one for each process.
        rank: of this process, for the names of the files.
        wanted: places of the samples to record, in any epoch; None for all.
    """

    def __init__(self, folder: str, rank: int, wanted: Optional[FrozenSet[int]]) -> None:
        self.folder, self.rank, self.wanted = folder, rank, wanted

    def instrument(self, dataset: Any) -> None:
        """Record the transforms of this data set and of those that it wraps."""
        for owner in _datasets(dataset):
            for transform in _transforms(getattr(owner, 'pipeline', None)):
                _change_class(transform, self, _TRANSFORM)
        _change_class(dataset, self, _DATASET)

    def write(self, record: Record) -> None:
        append_record(os.path.join(self.folder, f'samples.rank{self.rank}.{os.getpid()}.jsonl'),
                      record)


def read_samples(folder: str, rank: int) -> List[Record]:
    """Records of all processes of a rank, ordered by the place of the sample."""
    prefix = f'samples.rank{rank}.'
    names = sorted(name for name in os.listdir(folder) if name.startswith(prefix))
    records = [record for name in names for record in read_records(os.path.join(folder, name))]
    # the order within a sample is that of the file
    return sorted(records, key=lambda record: tuple(
        int(number) for number in record.path.split('/')[0].split()[1].split('.')))


def content_digest(value: Any) -> str:
    """16 hex digits that follow from the content of nested data: equal bytes, equal digest.

    Objects of unknown classes count by what their attributes hold, never by their address.
    """
    digest = hashlib.blake2b(digest_size=8)
    _update(digest.update, value, 0)
    return digest.hexdigest()


def _update(update: Callable[[bytes], None], value: Any, depth: int) -> None:
    if isinstance(value, torch.Tensor):
        # contiguous() keeps the strides of a single element, whatever they are
        value = value.detach().cpu().clone(memory_format=torch.contiguous_format)
        update(f'{value.dtype}{tuple(value.shape)}'.encode())
        update(value.reshape(-1).view(torch.uint8).numpy().tobytes())
    elif isinstance(value, (np.ndarray, np.generic)):
        update(f'{value.dtype}{value.shape}'.encode())
        if value.dtype == object:
            _update(update, value.tolist(), depth + 1)
        else:
            update(np.ascontiguousarray(value).tobytes())
    elif isinstance(value, dict):
        for key in sorted(value, key=repr):
            update(repr(key).encode())
            _update(update, value[key], depth + 1)
    elif isinstance(value, (list, tuple)):
        update(b'[%d' % len(value))
        for item in value:
            _update(update, item, depth + 1)
    elif isinstance(value, (set, frozenset)):
        _update(update, sorted(map(repr, value)), depth + 1)
    elif isinstance(value, BaseDataElement):
        _update(update, dict(value.all_items()), depth + 1)
    elif value is None or isinstance(value, (bool, int, float, complex, str, bytes)):
        update(repr(value).encode())
    elif depth < 8 and hasattr(value, '__dict__'):
        update(type(value).__qualname__.encode())
        _update(update, vars(value), depth + 1)
    else:
        update(type(value).__qualname__.encode())


def leaves(batch: Any, name: str = '') -> Dict[str, torch.Tensor]:
    """Tensors in nested data by their place; what is no tensor is left out."""
    if isinstance(batch, torch.Tensor):
        return {name: batch}
    if isinstance(batch, BaseDataElement):
        batch = dict(sorted(batch.all_items()))
    if hasattr(batch, 'tensor') and isinstance(batch.tensor, torch.Tensor):
        return {name: batch.tensor}
    found: Dict[str, torch.Tensor] = {}
    items = batch.items() if isinstance(batch, dict) else (
        enumerate(batch) if isinstance(batch, (list, tuple)) else ())
    for key, value in items:
        found.update(leaves(value, f'{name}.{key}' if name else str(key)))
    return found


def _datasets(dataset: Any) -> Iterator[Any]:
    yield dataset
    for name in ('dataset', 'datasets'):
        inner = getattr(dataset, name, None)
        for one in inner if isinstance(inner, (list, tuple)) else [inner]:
            if one is not None and hasattr(one, '__getitem__'):
                yield from _datasets(one)


def _transforms(pipeline: Any) -> Iterator[Any]:
    """Transforms of a pipeline and those inside of them, innermost first."""
    inner = getattr(pipeline, 'transforms', pipeline)
    if isinstance(inner, (list, tuple)):
        for one in inner:
            yield from _transforms(one)
            if callable(one) and not isinstance(one, type) and hasattr(one, '__dict__') and (
                    type(one).__name__ != 'Compose'):
                yield one


def _change_class(thing: Any, samples: Samples, methods: Dict[str, Callable]) -> None:
    """Let recording methods stand for those that the class of one object has."""
    original = getattr(type(thing), '_mmrepro_recorded', type(thing))
    if original not in _recorded:
        # not hasattr(): mmcv's cache_randomness cannot be asked for on a class
        own = {name: method for name, method in methods.items()
               if any(name in vars(base) for base in original.__mro__)}
        _recorded[original] = type(original.__name__, (original,), {
            **own, '_mmrepro_recorded': original, '__module__': original.__module__,
            '__qualname__': original.__qualname__, '__reduce_ex__': _reduce})
    thing.__class__ = _recorded[original]
    thing._mmrepro_samples = samples


def _reduce(thing: Any, protocol: int) -> tuple:
    """Pickles the object as one of its own class, to be changed again where it arrives."""
    plain = object.__new__(type(thing)._mmrepro_recorded)
    plain.__dict__.update(thing.__dict__)
    return _again, (plain, '__call__' in vars(type(thing)))


def _again(thing: Any, is_transform: bool) -> Any:
    _change_class(thing, thing._mmrepro_samples, _TRANSFORM if is_transform else _DATASET)
    return thing


def _place(samples: Samples, index: Any) -> Optional[str]:
    """Name of the sample that is about to be loaded; None when it is not wanted."""
    global _loaded
    if _current is not None:  # a transform loads a partner to mix in
        return f'{_current}/partner {index}'
    _loaded += 1
    batch = current_batch()
    if batch is None:
        return f'sample {_loaded}.{index}' if samples.wanted is None else None
    _, (epoch, position, *_) = batch._entry(batch.current)
    if samples.wanted is None or position in samples.wanted:
        return f'sample {epoch}.{position}'
    return None


def _getitem(self: Any, index: Any) -> Any:
    global _current, _number
    original = type(self)._mmrepro_recorded.__getitem__
    samples: Samples = self._mmrepro_samples
    place = _place(samples, index)
    if place is None:
        return original(self, index)
    outer, _current = _current, place
    before = generator_states.states()
    samples.write(Record('data', f'{place}/begin', type(self).__name__,
                         arguments=f'index={index}'))
    try:
        if outer is None:
            _number = 0
        result = original(self, index)
    finally:
        _current = outer
    keys, digests = _by_key(result)
    samples.write(Record('data', f'{place}/end', type(self).__name__, shapes=f'-> {keys}',
                         outputs=digests, generators=before,
                         drew=before != generator_states.states()))
    return result


def _call(self: Any, results: Any) -> Any:
    original = type(self)._mmrepro_recorded.__call__
    if _current is None:
        return original(self, results)
    given, inputs = _by_key(results)
    with _noted(self) as note:
        result = original(self, results)
        returned, outputs = _by_key(result)
        note.update(name=type(self)._mmrepro_recorded.__name__, shapes=f'{given} -> {returned}',
                    inputs=inputs, outputs=outputs, labels=tuple(given.split()))
    return result


def _indexes(self: Any, dataset: Any) -> Any:
    """Of the samples that a transform mixes in; the data set asks for them beforehand."""
    original = super(type(self), self).get_indexes
    if _current is None:
        return original(dataset)
    with _noted(self, 'get_indexes') as note:
        result = original(dataset)
        note.update(name=f'{type(self)._mmrepro_recorded.__name__}.get_indexes',
                    shapes='-> indexes', outputs=(str(result), ))
    return result


@contextmanager
def _noted(transform: Any, method: str = 'transform') -> Iterator[Dict[str, Any]]:
    """Write down what a transform did inside, and which generators and calls it used."""
    global _number
    samples: Samples = transform._mmrepro_samples
    number, _number = _number, _number + 1
    before, own = generator_states.states(), _own(transform)
    watch, note = generator_states.Watch(), {}
    watch.start()
    try:
        yield note
    finally:
        watch.stop()
    own = {**_own(transform), **own}  # a transform may make its generator in the first call
    name = note.pop('name')
    samples.write(Record(
        'data', f'{_current}/{number}', name, **note, generators=before,
        drew=before != generator_states.states(), calls=watch.take(),
        own=tuple(f'{key}={state}' for key, state in own.items()),
        stack=(_where(type(transform)._mmrepro_recorded, method), )))


_TRANSFORM = {'__call__': _call, 'get_indexes': _indexes}
_DATASET = {'__getitem__': _getitem}


def _by_key(results: Any) -> Tuple[str, Tuple[str, ...]]:
    """Names of what a sample holds, and the digest of each."""
    if not isinstance(results, dict):
        return 'all', (content_digest(results), )
    keys = sorted(map(str, results))
    named = {str(key): value for key, value in results.items()}
    return ' '.join(keys), tuple(content_digest(named[key]) for key in keys)


def _own(transform: Any) -> Dict[str, str]:
    """Generators of the transform, its class and module, which nobody seeds; and plain values
    there, named :data:`ATTRIBUTE` or :data:`GLOBAL` and their name.
    """
    attributes: Dict[str, Any] = {}
    for base in reversed(type(transform).__mro__):
        attributes.update(vars(base))
    attributes.update(vars(transform))
    module = sys.modules.get(type(transform)._mmrepro_recorded.__module__)
    namespaces = {ATTRIBUTE: attributes, GLOBAL: vars(module) if module else {}}
    return {**generator_states.own(*namespaces.values()),
            **{f'{prefix}{name}': repr(value)[:VALUE_TEXT]
               for prefix, namespace in namespaces.items() for name, value in namespace.items()
               if isinstance(value, (bool, int, float, str)) and not name.startswith('__')}}


def _where(cls: type, method: str) -> Tuple[str, int, str]:
    method = next((vars(base)[name] for base in cls.__mro__ for name in (method, '__call__')
                   if name in vars(base)), None)
    code = getattr(method, '__code__', None)
    return (code.co_filename, code.co_firstlineno, cls.__name__) if code else ('', 0, cls.__name__)
