"""Record inputs and outputs of every transform, in the process that loads the sample.

The class of a transform is replaced by a subclass with the same name, so that code which looks at
its type, name or attributes is not disturbed.
"""
from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Callable, NamedTuple

from ..data import dataset_tree
from ..data.batch_context import current_batch
from ..fingerprint import generator_states
from ..fingerprint.operator_recorder import method_site
from ..fingerprint.records import ATTRIBUTE, GLOBAL, Record, append_record, read_records
from ..objects.digests import exact_digest
from ..objects.walks import has_attribute
from ..util.scoped import extend, replaced

VALUE_TEXT = 80  # characters of a plain value that a transform keeps
_STOCK = '_mmrepro_recorded'  # attribute of a class that records: the class of before


class _Loading(threading.local):
    """The sample that is being loaded."""
    name: str | None = None
    transforms = 0  # number of transforms applied to it so far
    samples = 0  # number of samples loaded so far


_loading = _Loading()


class SampleRecorder(NamedTuple):
    """Writes the records; pickled into worker processes with the dataset."""
    folder: str  # for the files, one per process
    rank: int  # of this process, for the names of the files
    positions: Sequence[int] | None  # positions of the samples to record; None for all

    def instrument(self, dataset: Any) -> None:
        """Record the transforms of this dataset and of the datasets that it wraps."""
        for owner in dataset_tree.datasets(dataset):
            for _, transform in dataset_tree.transforms(getattr(owner, 'pipeline', None)):
                if has_attribute(transform, '__dict__') and type(transform).__name__ != 'Compose':
                    _record_calls(transform, self, _TRANSFORM)
        _record_calls(dataset, self, _DATASET)

    def name_of(self, index: Any) -> str | None:
        """Return the name of the sample about to be loaded; None when it is not recorded."""
        if _loading.name is not None:  # a transform loads a partner to mix in
            return f'{_loading.name}/partner {index}'
        _loading.samples += 1
        batch = current_batch()
        if batch is None:
            return f'sample {_loading.samples}.{index}' if self.positions is None else None
        _, (epoch, position, *_) = batch.entry(batch.current)
        if self.positions is None or position in self.positions:
            return f'sample {epoch}.{position}'
        return None

    def write(self, record: Record) -> None:
        append_record(os.path.join(self.folder, f'samples.rank{self.rank}.{os.getpid()}.jsonl'),
                      record)


def read_samples(folder: str, rank: int) -> list[Record]:
    """Read the records of all processes of a rank, ordered by the position of the sample."""
    prefix = f'samples.rank{rank}.'
    names = sorted(name for name in os.listdir(folder) if name.startswith(prefix))
    records = [record for name in names for record in read_records(os.path.join(folder, name))]
    # a stable sort keeps the order within a sample
    return sorted(records, key=lambda record: record.sample or ())


def _record_calls(thing: Any, samples: SampleRecorder,
                  methods: dict[str, Callable[..., Any]]) -> Any:
    """Let those of the methods record that the class of an object has; return the object."""
    classes = getattr(type(thing), _STOCK, type(thing)).__mro__
    # not hasattr(): mmcv's cache_randomness cannot be looked up on a class
    extend(thing, {'__reduce_ex__': _reduce, **{
        name: method for name, method in methods.items()
        if any(name in vars(base) for base in classes)}}, stock=_STOCK)
    thing._mmrepro_samples = samples
    return thing


def _reduce(thing: Any, protocol: int) -> tuple[Any, ...]:
    """Pickle the object with its original class; :func:`_record_calls` again on arrival."""
    plain = object.__new__(type(thing)._mmrepro_recorded)
    plain.__dict__.update(thing.__dict__)
    methods = _TRANSFORM if '__call__' in vars(type(thing)) else _DATASET
    return _record_calls, (plain, thing._mmrepro_samples, methods)


def _getitem(self: Any, index: Any) -> Any:
    original = type(self)._mmrepro_recorded.__getitem__
    samples: SampleRecorder = self._mmrepro_samples
    name = samples.name_of(index)
    if name is None:
        return original(self, index)
    before = generator_states.states()
    innermost = type(dataset_tree.branch(self, index)[-1])
    samples.write(Record(
        'data', f'{name}/begin', type(self).__name__, arguments=f'index={index}', stack=(
            method_site(getattr(innermost, '_mmrepro_recorded', innermost), 'load_data_list'), )))
    if _loading.name is None:
        _loading.transforms = 0
    with replaced(_loading, name=name):
        result = original(self, index)
    keys, digests = _by_key(result)
    samples.write(Record('data', f'{name}/end', type(self).__name__, shapes=f'-> {keys}',
                         outputs=digests, generators=before,
                         drew=before != generator_states.states()))
    return result


def _call(self: Any, results: Any) -> Any:
    original = type(self)._mmrepro_recorded.__call__
    if _loading.name is None:
        return original(self, results)
    given, inputs = _by_key(results)
    with _recording(self) as fields:
        result = original(self, results)
        returned, outputs = _by_key(result)
        fields.update(name=type(self)._mmrepro_recorded.__name__, shapes=f'{given} -> {returned}',
                      inputs=inputs, outputs=outputs, labels=tuple(given.split()))
    return result


def _get_indexes(self: Any, dataset: Any) -> Any:
    """Record the indexes of the samples that a transform mixes in; the dataset asks for them."""
    original = super(type(self), self).get_indexes
    if _loading.name is None:
        return original(dataset)
    with _recording(self, 'get_indexes') as fields:
        result = original(dataset)
        fields.update(name=f'{type(self)._mmrepro_recorded.__name__}.get_indexes',
                      shapes='-> indexes', outputs=(str(result), ))
    return result


_TRANSFORM = {'__call__': _call, 'get_indexes': _get_indexes}
_DATASET = {'__getitem__': _getitem}


@contextmanager
def _recording(transform: Any, method: str = 'transform') -> Iterator[dict[str, Any]]:
    """Write a record with the fields put into the dict, and the generators and calls used."""
    samples: SampleRecorder = transform._mmrepro_samples
    number = _loading.transforms
    _loading.transforms += 1
    before, kept = generator_states.states(), _kept_values(transform)
    fields: dict[str, Any] = {}
    watch = generator_states.Watch()
    with watch:
        yield fields
    # a transform may create its generator in the first call
    kept = {**_kept_values(transform), **kept}
    name = fields.pop('name')
    samples.write(Record(
        'data', f'{_loading.name}/{number}', name, **fields, generators=before,
        drew=before != generator_states.states(), calls=watch.take(),
        own=tuple(f'{key}={state}' for key, state in kept.items()),
        stack=(method_site(type(transform)._mmrepro_recorded, method, '__call__'), )))


def _by_key(results: Any) -> tuple[str, tuple[str, ...]]:
    """Return the keys of a sample, and the digest of each value."""
    if not isinstance(results, dict):
        return 'all', (exact_digest(results), )
    named = {str(key): value for key, value in sorted(results.items(), key=lambda kv: str(kv[0]))}
    return ' '.join(named), tuple(map(exact_digest, named.values()))


def _kept_values(transform: Any) -> dict[str, str]:
    """Return the generators and plain values in the transform, its class and its module.

    Names of plain values begin with :data:`ATTRIBUTE` or :data:`GLOBAL`.
    """
    attributes: dict[str, Any] = {}
    for base in reversed(type(transform).__mro__):
        attributes.update(vars(base))
    attributes.update(vars(transform))
    module = sys.modules.get(type(transform)._mmrepro_recorded.__module__)
    namespaces = {ATTRIBUTE: attributes, GLOBAL: vars(module) if module else {}}
    return {**generator_states.kept_states(*namespaces.values()),
            **{f'{prefix}{name}': repr(value)[:VALUE_TEXT]
               for prefix, namespace in namespaces.items() for name, value in namespace.items()
               if isinstance(value, (bool, int, float, str)) and not name.startswith('__')}}
