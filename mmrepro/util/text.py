"""Text for messages and tables."""
from __future__ import annotations

import difflib
import os
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

_NUMBERED: Counter[Any] = Counter()  # names that were asked for, by owner


def shorten(value: Any, width: int = 60) -> str:
    """Return ``str(value)``, cut to ``width`` characters with three dots at the end.

    >>> shorten('a rather long value', width=12)
    'a rather ...'
    """
    text = str(value)
    return text if len(text) <= width else f'{text[:width - 3]}...'


def encoded(text: str) -> bytes:
    """Return a text in UTF-8, also where it holds what does not belong there.

    Python decodes a file name that is not UTF-8 to lone surrogates. Different texts have different
    bytes.
    """
    return text.encode(errors='surrogatepass')


def qualified_name(value: Any) -> str:
    """Return the dotted path of a class or function."""
    return f'{value.__module__}.{value.__qualname__}'


def class_name(kind: Any) -> str:
    """Return the bare name of a config's ``type``, a class or a string with or without a scope.

    >>> class_name('mmdet.Resize'), class_name(int)
    ('Resize', 'int')
    """
    return kind.rpartition('.')[2] if isinstance(kind, str) else getattr(
        kind, '__name__', type(kind).__name__)


def duration(seconds: float) -> str:
    """Format a time in seconds, minutes or hours.

    >>> duration(50), duration(130), duration(9000)
    ('50 s', '2 min', '2.5 h')
    """
    if seconds < 90:
        return f'{seconds:.0f} s'
    return f'{seconds / 60:.0f} min' if seconds < 5400 else f'{seconds / 3600:.1f} h'


def counted(number: int, what: str) -> str:
    """Return a number with its noun, which is in the plural for all numbers but 1.

    >>> counted(1, 'step'), counted(1200, 'step')
    ('1 step', '1,200 steps')
    """
    return f'{number:,} {what}{"" if number == 1 else "s"}'


def listed(names: Sequence[str], most: int = 3) -> str:
    """Join the first ``most`` names, and say how many more there are.

    >>> listed(['a', 'b', 'c'], most=2)
    'a, b and 1 more'
    """
    more = len(names) - most
    return ', '.join(names[:most]) + (f' and {more} more' if more > 0 else '')


def not_a(wanted: str, path: str) -> str:
    """Say that a path does not exist, or what it is instead.

    A path with unprintable characters is quoted.
    """
    shown = path if path.strip() and path.isprintable() else repr(path)
    if not os.path.exists(path):
        return f'{shown}: no such {wanted}'
    return f'{shown}: a {"folder" if os.path.isdir(path) else "file"}, not a {wanted}'


def similarity(a: str, b: str) -> float:
    """Return how similar two names are, from 0 to 1 (they are equal)."""
    return difflib.SequenceMatcher(None, a, b).ratio()


def nearest(name: str, known: Iterable[str], most: int = 1, cutoff: float = 0.6) -> list[str]:
    """Return at most ``most`` of the known names, with a :func:`similarity` from ``cutoff`` on.

    The most similar name comes first.
    """
    return difflib.get_close_matches(name, list(known), n=most, cutoff=cutoff)


def did_you_mean(name: str, known: Iterable[str], cutoff: float = 0.6) -> str:
    """Return the end of a message that suggests the nearest of the known names; '' if none is near.

    >>> did_you_mean('trian', ['train', 'test'])
    "; did you mean 'train'?"
    """
    return ''.join(f'; did you mean {near!r}?' for near in nearest(name, known, cutoff=cutoff))


def page(path: str) -> str:
    """Return the path of a page of the documentation: of the installed file, or in a checkout."""
    installed = os.path.join(os.path.dirname(os.path.dirname(__file__)), '.mim', 'docs', path)
    return installed if os.path.exists(installed) else f'docs/{path}'


def numbered(name: str, owner: Any = None) -> str:
    """Return ``name`` at the first call for ``owner`` in this process, then ``name_1`` and so on.

    >>> numbered('a name'), numbered('a name')
    ('a name', 'a name_1')
    """
    earlier = _NUMBERED[name, owner]
    _NUMBERED[name, owner] += 1
    return f'{name}_{earlier}' if earlier else name
