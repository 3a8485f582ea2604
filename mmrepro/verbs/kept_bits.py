"""The bits of values in tests, kept in a file for each class of machines."""
from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mmengine.config import Config

from ..errors import GoldenError
from ..facts.collect import collect_facts
from ..objects.digests import state_digest
from ..ops import portable
from ..util.files import read_json, write_whole
from .golden import class_name, machine_class

_FORMAT = 1
_SHAPE = {'kind': str, 'format': int, 'classes': {str: dict}, 'bits': {str: dict}}


class NoBits(GoldenError):
    """No bits are kept for machines of this class."""


def digests(value: Any, name: str = '') -> Iterator[tuple[str, str]]:
    """Yield the name and a digest of 16 digits of each value in nested dicts, lists and tuples.

    An empty one is a value.

    >>> [name for name, _ in digests(dict(loss=1., weights=[2, 3]))]
    ['loss', 'weights.0', 'weights.1']
    """
    if not isinstance(value, (dict, list, tuple)) or not value:
        yield name or 'the value', state_digest(value)[:16]
        return
    for key, part in value.items() if isinstance(value, dict) else enumerate(value):
        yield from digests(part, f'{name}.{key}' if name else str(key))


class KeptBits:
    """The calls of one test, in order, and the JSON file with their bits, which need not exist."""

    def __init__(self, path: Path, test: str) -> None:
        self.path, self.test = path, test
        self._calls: list[dict[str, str]] = []

    def next(self, value: Any, update: bool = False) -> str:
        """Return what differs in the next call of the test; '' if nothing does.

        Args:
            update: note the bits for :meth:`write`, and compare nothing.

        Raises:
            NoBits: the file has bits of this test, but of other classes of machines only.
            GoldenError: the file is damaged, or two values have one name.
        """
        found: dict[str, str] = {}
        for part, digest in digests(value):
            if part in found:
                raise GoldenError(f'same_bits in {self.test}: two values are called {part!r}')
            found[part] = digest
        self._calls.append(found)
        if update:
            return ''
        bits, name = self._read()['bits'], class_name(_facts())
        again = 'pytest --mmrepro-update keeps them'
        if not any(self.test in tests for tests in bits.values()):
            return f'{self.path} has no bits of {self.test}; {again}'
        if self.test not in bits.get(name, ()):
            raise NoBits(f'{self.path} has bits of {self.test} for other machines and versions, '
                         f'and this is {name}; {again}')
        calls, number = bits[name][self.test], len(self._calls)
        if number > len(calls):
            return f'call {number} of same_bits in {self.test} is new; {again}'
        expected = calls[number - 1]
        differing = [part for part in {**expected, **found}
                     if expected.get(part) != found.get(part)]
        if not differing:
            return ''
        return (f'{len(differing)} of {len(found)} values have different bits from those in '
                f'{self.path} ({name}), the first one is {differing[0]}. If that is intended, '
                f'{again}')

    def missing(self) -> str:
        """Return what a test that has ended did not compare; '' for nothing."""
        kept = self._read()['bits'].get(class_name(_facts()), {}).get(self.test, [])
        return '' if len(self._calls) >= len(kept) else (
            f'same_bits was called {len(self._calls)} times in {self.test}, and {self.path} has '
            f'{len(kept)} calls; pytest --mmrepro-update keeps these')

    def write(self) -> None:
        """Put the bits of all calls into the file, for this class of machines."""
        content, facts = self._read(), _facts()
        name = class_name(facts)
        content['classes'][name] = machine_class(facts)
        content['bits'].setdefault(name, {})[self.test] = self._calls
        self.path.parent.mkdir(exist_ok=True)
        write_whole(str(self.path),
                    json.dumps(content, indent=1, sort_keys=True, default=str) + '\n')

    def _read(self) -> dict[str, Any]:
        if not self.path.exists():
            return dict(kind='same_bits', format=_FORMAT, classes={}, bits={})
        content = read_json(str(self.path), GoldenError, _SHAPE)
        if (content['kind'], content['format']) != ('same_bits', _FORMAT):
            raise GoldenError(f'{self.path}: not a file of same_bits of format {_FORMAT}')
        return content


def _facts() -> dict[str, Any]:
    randomness = dict(numerics=dict(cpu='portable')) if portable.installed() else {}
    return collect_facts(Config(), randomness, 1)
