"""Read files that may be damaged: JSON, and the shape of what files hold; write whole files.

A shape is a type, a :class:`Rule`, ``[shape]`` for a list, or a dict: of keys (``'key?'`` may be
missing), and with ``str`` or ``int`` as a key for all others, which have this type.
"""
from __future__ import annotations

import json
import os
import reprlib
from collections.abc import Iterable
from contextlib import suppress
from typing import Any, Callable, NamedTuple

from ..errors import MMReproError

MAX_DEPTH = 50  # of nested lists and objects; what handles them is recursive


class Rule(NamedTuple):
    """A shape that no type describes."""
    holds: Callable[[Any], bool]
    allowed: str  # in words


def or_none(*types: type) -> Rule:
    """Return the shape of values of these types, or None."""
    return Rule(lambda value: value is None or isinstance(value, types),
                ' or '.join([*(kind.__name__ for kind in types), 'None']))


SCALAR = or_none(str, int, float)
# arithmetic with an integer that is too large for a float raises OverflowError
NUMBER = Rule(lambda value: isinstance(value, float) or isinstance(value, int)
              and abs(value) < 2**1023, 'a number')


def read_json(path: str, error: type[MMReproError], shape: Any = object) -> Any:
    """Return the content of a JSON file.

    Raises:
        error: it cannot be read, is not JSON, or has another shape; names file, key and value.
    """
    try:
        with open(path, 'rb') as file:
            return parse_json(path, file.read(), error, shape)
    except OSError as problem:
        raise error(f'{path}: {problem.strerror}') from problem


def parse_json(where: str, text: bytes, error: type[MMReproError], shape: Any = object) -> Any:
    """Return the value of a JSON text; ``where`` is for the error."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as problem:
        raise error(f'{where}: not JSON: {problem}') from problem
    if _exceeds(value, MAX_DEPTH):
        raise error(f'{where}: nested more than {MAX_DEPTH} times')
    return checked(where, value, error, shape)


def _exceeds(value: Any, depth: int) -> bool:
    parts: Iterable[Any] = ()
    if isinstance(value, dict):
        parts = value.values()
    elif isinstance(value, list):
        parts = value
    return depth < 0 or any(_exceeds(part, depth - 1) for part in parts
                            if isinstance(part, (dict, list)))


def checked(where: str, value: Any, error: type[MMReproError], shape: Any) -> Any:
    """Return ``value``; raise ``error`` if it has another shape."""
    problem = mismatch(value, shape)
    if problem is not None:
        raise error(f'{where}: {problem}')
    return value


def mismatch(value: Any, shape: Any, name: str = '') -> str | None:
    """Return the part of ``value`` with another shape, and what is allowed; None if all parts fit.

    >>> mismatch(dict(a=[1, 'x']), {'a': [int], 'b?': str})
    "a[1] is 'x'; allowed: int"
    """
    kind = type(shape) if isinstance(shape, (dict, list)) else shape
    holds = shape.holds(value) if isinstance(shape, Rule) else isinstance(value, kind)
    if not holds or kind is int and isinstance(value, bool):
        allowed = shape.allowed if isinstance(shape, Rule) else kind.__name__
        return f'{name or "it"} is {reprlib.repr(value)}; allowed: {allowed}'
    parts: list[tuple[Any, Any, str]] = []
    if isinstance(shape, list):
        parts = [(part, shape[0], f'{name}[{index}]') for index, part in enumerate(value)]
    elif isinstance(shape, dict):
        rest = next((kind for kind in shape if isinstance(kind, type)), object)
        for key in shape:
            if isinstance(key, str) and not key.endswith('?') and key not in value:
                return f'{name} lacks {key}'.lstrip()
        for key, part in value.items():
            inner = shape.get(key, shape.get(f'{key}?', shape.get(rest, object)))
            parts += [(key, rest, f'a key of {name}'), (part, inner, f'{name}.{key}'.lstrip('.'))]
    return next(filter(None, (mismatch(*part) for part in parts)), None)


def partial_of(path: str) -> str:
    """Return the temporary name, in the same folder, under which this process writes a file."""
    folder, name = os.path.split(path)
    return os.path.join(folder, f'.{name}.{os.getpid()}.partial')


def remove_partial(folder: str) -> None:
    """Remove the partial files of processes that were killed while they wrote."""
    for name in os.listdir(folder):
        if name.startswith('.') and name.endswith('.partial'):
            with suppress(OSError):
                os.remove(os.path.join(folder, name))


def write_whole(path: str, text: str, encoding: str | None = 'utf-8') -> None:
    """Write a text file that holds its old content or all of the new one, whenever it is read."""
    partial = partial_of(path)
    try:
        with open(partial, 'w', encoding=encoding) as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    except BaseException:
        with suppress(OSError):
            os.remove(partial)
        raise
