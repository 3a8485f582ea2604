"""A difference of two streams, with all that was recorded around it: what the catalogue asks."""
from __future__ import annotations

from typing import List, Optional, Sequence, Tuple

from ..fingerprint.generator_states import FROM, NAMES
from ..fingerprint.records import SEPARATOR, Record, useful_calls
from .alignment import Difference

__all__ = ['Case']

UNTOLD = ('process id', 'resumed', 'validated')  # rows ask for them; they are no evidence


class Case:
    """A difference with all that was recorded around it.

    Attributes:
        found: the difference.
        a, b: its records; None where a side has none.
        record: one of them.
    """

    def __init__(self, found: Difference, stream_a: Sequence[Record],
                 stream_b: Sequence[Record]) -> None:
        self.found = found
        self.streams = stream_a, stream_b
        self.a = None if found.a is None else stream_a[found.a]
        self.b = None if found.b is None else stream_b[found.b]
        self.record: Record = self.b if self.a is None else self.a

    @property
    def kind(self) -> str:
        return self.found.kind

    @property
    def phase(self) -> str:
        return self.record.phase

    def any(self, attribute: str) -> List[str]:
        """Texts of one attribute of the records of both sides."""
        return [text for r in (self.a, self.b) if r is not None for text in getattr(r, attribute)]

    def calls(self, what: str) -> List[str]:
        """Calls of this kind that went right before, or, for a transform, in its course."""
        return [call for call in self.any('calls') if call.startswith(what)]

    def earlier_calls(self, what: str) -> List[str]:
        """Calls of this kind that the function made before which now passes the value on.

        Found by its file and name, among the records of the same module in the same phase.
        """
        found = []
        for stream, number in zip(self.streams, (self.found.a, self.found.b)):
            if number is None or not stream[number].stack:
                continue
            record, (file, _, function) = stream[number], useful_calls(stream[number].stack)[0]
            for earlier in stream[:number + 1]:
                if (earlier.phase, earlier.path) == (record.phase, record.path):
                    found += [call for call in earlier.calls if call.startswith(what) and any(
                        _is_in(place, file, function)
                        for place in call.split(': ', 1)[1].split(FROM))]
        return list(dict.fromkeys(found))

    def attributes(self) -> List[str]:
        """Differing settings and attributes: ``name: value of A / value of B``."""
        values = []
        for stream in self.streams:
            texts = [t for r in stream if r.name == 'attributes' for t in r.labels]
            values.append(dict(text.split('=', 1) for text in texts))
        a, b = values
        return [f'{name}: {a.get(name)} / {b.get(name)}' for name in {**a, **b}
                if a.get(name) != b.get(name) and name not in UNTOLD]

    def own_generators(self) -> List[str]:
        """Those of the module itself that differ, as :meth:`attributes`."""
        return [text for text in self.attributes()
                if text.startswith(f'{self.record.path}.') and ': generator ' in text]

    def attribute(self, name: str) -> Tuple[Optional[str], Optional[str]]:
        """One value of both sides."""
        found: List[Optional[str]] = []
        for stream in self.streams:
            texts = [t for r in stream if r.name == 'attributes' for t in r.labels]
            found.append(dict(text.split('=', 1) for text in texts).get(name))
        return found[0], found[1]

    def differs(self, name: str) -> bool:
        a, b = self.attribute(name)
        return a != b

    def generators(self) -> List[str]:
        """Names of global generators whose state differs at this record."""
        if self.a is None or self.b is None:
            return []
        return [name for name, x, y in zip(NAMES, self.a.generators, self.b.generators) if x != y]

    def arguments(self) -> List[str]:
        """Differing arguments: ``name=value of A / value of B``."""
        if self.a is None or self.b is None:
            return []
        texts = [record.arguments.split(SEPARATOR) for record in (self.a, self.b)]
        if self.record.is_state:
            a, b = (dict(t.split('=', 1) for t in text if '=' in t) for text in texts)
            return [f'{name}={a.get(name)} / {b.get(name)}' for name in {**a, **b}
                    if a.get(name) != b.get(name)]
        return [f'{x} / {y.split("=", 1)[-1]}' for x, y in zip(*texts) if x != y]

    def state_names(self) -> List[str]:
        """Names of the tensors that differ, of a state."""
        return [name for name in self.found.which if isinstance(name, str)]

    def mover(self) -> Optional[Record]:
        """The record in whose course, or before which, a generator went another way."""
        moved = self.found.moved
        if moved is None:
            return None
        for stream, start, extra in ((self.streams[0], moved.a, self.found.extra_a),
                                     (self.streams[1], moved.b, self.found.extra_b)):
            drawing = [n for n in extra if n >= start and stream[n].drew]
            if drawing:
                return stream[drawing[0]]
        last, after = self.streams[0][moved.a], self.streams[0][moved.a + 1]
        # a transform is written down when it ends, with the states from before it began
        return last if last.phase == 'data' and last.name != 'batch' else after

    def labels(self) -> List[str]:
        """Names of the inputs that differ."""
        return [self.record.labels[i] for i in self.found.which
                if isinstance(i, int) and i < len(self.record.labels) and self.record.labels[i]]


def _is_in(place: str, file: str, function: str) -> bool:
    """Whether ``[name at ]file:line in function`` is in this function."""
    start, _, name = place.rpartition(' in ')
    return name == function and start.rpartition(':')[0].rpartition(' at ')[2] == file
