"""Properties of the first difference of two streams, which :mod:`.causes` tests."""
from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from typing import Any

from ..fingerprint import records
from ..fingerprint.divergence import differing_names
from ..fingerprint.generator_states import NAMES, is_in
from ..fingerprint.records import ATTRIBUTE, GLOBAL, SEPARATOR, Frame, Phase, Record, useful_calls
from .alignment import StreamDifference

NO_EVIDENCE = ('resumed', 'validated')  # attributes that are not shown


class DifferenceContext:
    """A difference, with everything that was recorded around it."""

    def __init__(self, found: StreamDifference, stream_a: Sequence[Record],
                 stream_b: Sequence[Record]) -> None:
        self.found, self.kind = found, found.kind
        self.streams = stream_a, stream_b
        # its records in run A and run B; None where a run has none
        self.a: Any = None if found.a is None else stream_a[found.a]
        self.b: Any = None if found.b is None else stream_b[found.b]
        self.record: Record = next(record for record in (self.a, self.b) if record is not None)
        self.phase: Phase = self.record.phase
        self._attributes = [_named(text for record in stream
                                   if record.name == records.ATTRIBUTES and self._concerns(record)
                                   for text in record.labels) for stream in self.streams]
        self._own = [_named(record.own if record else ()) for record in (self.a, self.b)]

    def _concerns(self, owner: Record) -> bool:
        """Whether attributes and globals may reach this difference.

        Those of the process and of the model always, of optimizer and sampler where they differ,
        others where their file is on the stack.
        """
        kind = owner.path.partition(':')[0]
        return kind in ('', 'model') or kind == ('sampler' if self.in_order else self.phase) or (
            owner.stack[0][0] in {call[0] for call in self.record.stack})

    def named(self, name: str) -> list[Record]:
        """Return the records of both runs that have this name."""
        return [record for stream in self.streams for record in stream if record.name == name]

    @property
    def in_order(self) -> bool:
        """Whether the sampler returned another index."""
        return self.record.moment == 'begin'

    @property
    def origin(self) -> Frame | None:
        """The code that makes what differs; None for that of the record.

        A data list differs in the first transform that sees it, an order in the dataset.
        """
        if self.in_order:
            return next((record.stack[0] for record in self.named(records.SAMPLER)), None)
        begin = self.record.path.rpartition('/')[0] + '/begin'
        return next((record.stack[0] for stream in self.streams for record in stream
                     if self.in_data_list and record.path == begin), None)

    def while_building(self, source: str) -> list[str]:
        """Return calls of ``source`` by code of the user when the dataset was built."""
        return [call for record in self.named(records.DATASET) for call in record.calls
                if call.startswith(source)]

    @property
    def from_outside(self) -> bool:
        """Whether the difference is a value that no operator computed."""
        return self.kind in ('input', 'argument')

    @property
    def different_steps(self) -> bool:
        """Whether the runs executed different operators."""
        return self.kind in ('extra', 'missing', 'replaced')

    @property
    def in_transform(self) -> bool:
        return self.record.moment.isdecimal()

    @property
    def in_data_list(self) -> bool:
        """Whether the input of the first transform, an entry of the data list, differs."""
        return self.kind == 'input' and self.record.moment == '0'

    def calls(self, source: str) -> list[str]:
        """Return calls of ``source`` right before the record or, for a transform, during it."""
        return [call for record in (self.a, self.b) if record is not None
                for call in record.calls if call.startswith(source)]

    def calls_anywhere(self, source: str) -> list[str]:
        """Return calls of ``source`` at any time of the recording."""
        return list(dict.fromkeys(call for stream in self.streams for record in stream
                                  for call in record.calls if call.startswith(source)))

    @property
    def reordered(self) -> bool:
        """Whether both runs use the same tensors here, in another order."""
        if self.kind != 'input':
            return False
        if sorted(self.a.inputs) == sorted(self.b.inputs):
            return True
        differing = [{record.inputs[i] for i in self.found.which} for record in (self.a, self.b)]
        # each run uses all of them one after the other, in the same line
        later = [{digest for other in stream[number:] if other.site == record.site
                  and useful_calls(other.stack)[:1] == useful_calls(record.stack)[:1]
                  for digest in other.inputs}
                 for stream, number, record in zip(
                     self.streams, (self.found.a, self.found.b), (self.a, self.b))]
        return differing[0] <= later[1] and differing[1] <= later[0]

    def earlier_calls(self, source: str) -> list[str]:
        """Return calls of ``source`` earlier in the function that passes the value on.

        The function is found by its file and name, among the records of the same module and phase.
        """
        calls = []
        for stream, number in zip(self.streams, (self.found.a, self.found.b)):
            record = stream[number]
            for file, _, function in useful_calls(record.stack)[:1]:
                calls += [call for earlier in stream[:number + 1]
                          if (earlier.phase, earlier.path) == (record.phase, record.path)
                          for call in earlier.calls
                          if call.startswith(source) and is_in(call, file, function)]
        return list(dict.fromkeys(calls))

    def differs(self, attribute: str) -> bool:
        a, b = self._attributes
        return a.get(attribute) != b.get(attribute)

    def attributes(self) -> list[str]:
        """Return differing settings and attributes: ``name: value in A / value in B``.

        Those of the module that the record belongs to come first.
        """
        rows = sorted(_differing(*self._attributes), key=lambda row: -len(
            os.path.commonprefix([row[0], self.record.path])))
        return [f'{name}: {a} / {b}' for name, a, b in rows
                if name not in NO_EVIDENCE]

    def module_generators(self) -> list[str]:
        """Return generators of the module itself that differ, as in :meth:`attributes`."""
        return [text for text in self.attributes()
                if text.startswith(f'{self.record.path}.') and ': generator ' in text]

    def transform_generators(self) -> list[str]:
        """Return generators of the transform whose states differ."""
        return [f'{name}: state {a} / {b}' for name, a, b in _differing(*self._own)
                if not name.startswith((ATTRIBUTE, GLOBAL))]

    def transform_values(self) -> list[str]:
        """Return plain values that the transform keeps and that differ."""
        return [f'{name}: {a} / {b}' for name, a, b in _differing(*self._own)
                if name.startswith((ATTRIBUTE, GLOBAL))]

    def generators(self) -> list[str]:
        """Return names of global generators whose state differs at this record."""
        if self.a is None or self.b is None:
            return []
        return [name for name, x, y in zip(NAMES, self.a.generators, self.b.generators) if x != y]

    def arguments(self) -> list[str]:
        """Return differing arguments: ``name=value in A / value in B``."""
        if self.a is None or self.b is None:
            return []
        a, b = (record.arguments.split(SEPARATOR) for record in (self.a, self.b))
        if self.record.is_state:
            return [f'{name}={x} / {y}' for name, x, y in _differing(_named(a), _named(b))]
        return [f'{x} / {y.split("=", 1)[-1]}' for x, y in zip(a, b) if x != y]

    def state_names(self) -> list[str]:
        """Return the names of the differing tensors of a state."""
        return [name for name in self.found.which if isinstance(name, str)]

    def labels(self) -> list[str]:
        """Return names of the inputs that differ."""
        return [self.record.labels[i] for i in self.found.which
                if isinstance(i, int) and i < len(self.record.labels) and self.record.labels[i]]

    def outside_sources(self) -> list[str]:
        """Return what may have brought in a different value from outside of torch."""
        sources = [*self.arguments(), *(f'attribute {text}' for text in self.attributes()),
                   *self.calls('')]
        if self.generators():
            sources.append('global generators in different states: '
                         f'{", ".join(self.generators())}')
        return sources

    def mover(self) -> str:
        """Return the record that advanced a generator in one run only, or ''."""
        moved = self.found.moved
        if moved is None:
            return ''
        last, mover = self.streams[0][moved.a], self.streams[0][moved.a + 1]
        if last.phase == 'data' and last.name != 'batch':
            mover = last  # a transform is recorded when it ends, with the states before it began
        for stream, start, extra in ((self.streams[1], moved.b, self.found.extra_b),
                                     (self.streams[0], moved.a, self.found.extra_a)):
            mover = next((stream[n] for n in extra if n >= start and stream[n].drew), mover)
        return ' '.join(filter(None, mover.site))


def _named(texts: Iterable[str]) -> dict[str, str]:
    return dict(text.split('=', 1) for text in texts if '=' in text)


def _differing(a: dict[str, str], b: dict[str, str]) -> list[tuple]:
    """Return name, value in A and value in B of what differs."""
    return [(name, a.get(name), b.get(name)) for name in differing_names(a, b)]
