"""Why a sample has two results: it is loaded twice more, and every Python call is followed."""
from __future__ import annotations

import functools
import gc
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType, FunctionType, MethodType, ModuleType
from typing import Any, Callable, NamedTuple

from ..data import dataset_tree
from ..digests import exact_digest
from ..reachable import attributes, belongs_to_user, closure, named_globals
from . import generator_states

MAX_KEPT = 1000  # items of a list or dict that are compared; of longer ones the number
SHOWN = 60  # characters of a value
LINES = 3  # of one kind in a message

# what was seen -> what to do; the first row that fits counts
FIXES = (
    ('entropy', 'draw from the generators of random, numpy.random or torch, which mmrepro seeds '
                'for each sample'),
    ('a generator is seeded', 'draw from the global generators, which mmrepro seeds for each '
                              'sample, or seed from one of them'),
    ('OpenCV', "draw from numpy.random: nothing seeds OpenCV's generator"),
    ('clock', 'compute the value from the sample or from the settings'),
    ('directory', 'sort the names'),
    ('process id', 'compute the value from the sample or from the settings'),
    ('thread', 'wait for the thread before the sample is returned, and draw nothing in it'),
    ('generator', 'make the generator when the transform is built and keep it in an attribute, so '
                  'that mmrepro finds and seeds it'),
    ('keeps', 'keep nothing from sample to sample; compute it from the sample or from the '
              'settings'),
    ('', 'let the result depend on the sample and on the global generators only'),
)


class _Return(NamedTuple):
    """A Python call that has returned."""
    member: int | None  # that was called, of _Trace.members
    within: int | None  # the innermost member that was at work
    name: str
    site: str
    begin: int  # number of returns before the call
    given: str  # digest of the arguments, for members
    result: str  # digest
    kept: dict[str, tuple[str, str]]  # of a member before the call: name -> digest, text
    read: tuple[str, ...]  # outside values that were read until the return


class _Trace:
    """The calls of datasets, transforms and functions of the user while a sample is loaded."""

    def __init__(self, members: Sequence[Any]) -> None:
        self._members = {id(one): number for number, one in enumerate(members)}
        self._all = members
        self._codes = {code: number for number, one in enumerate(members)
                       for code in [getattr(_function(one), '__code__', None)] if code}
        self._open: list[tuple[FrameType, int | None, int, str, dict]] = []
        self._watch = generator_states.Watch()
        self._read: list[str] = []
        self.returns: list[_Return] = []

    @contextmanager
    def running(self) -> Iterator[None]:
        before, collects = sys.getprofile(), gc.isenabled()
        gc.disable()  # finalizers of other objects are no part of the sample
        sys.setprofile(self._event)
        try:
            yield
        finally:
            sys.setprofile(before)
            if collects:
                gc.enable()

    def _event(self, frame: FrameType, event: str, value: Any) -> None:
        if event == 'call':
            self._enter(frame)
        elif event == 'return' and self._open and self._open[-1][0] is frame:
            self._leave(frame, value)
        elif event == 'c_call':
            self._watch.called(frame, event, value)
            self._read += self._watch.take()

    def _enter(self, frame: FrameType) -> None:
        code = frame.f_code
        if code.co_name == 'start' and code.co_filename.endswith('/threading.py') and frame.f_back:
            self._read.append(f'thread: started at {_site(frame.f_back)}')
        member = self._member(frame)
        within = next((one for _, one, *_ in reversed(self._open) if one is not None), None)
        if member == within:
            member = None
        if member is None and not belongs_to_user(frame.f_globals.get('__name__')):
            return
        given, kept = '', {}
        if member is not None:
            names = code.co_varnames[:code.co_argcount]
            values = [frame.f_locals.get(name) for name in names]
            given = exact_digest([one for one in values if id(one) not in self._members])
            kept = _kept(self._all[member])
        self._open.append((frame, member, len(self.returns), given, kept))

    def _leave(self, frame: FrameType, value: Any) -> None:
        _, member, begin, given, kept = self._open.pop()
        within = member if member is not None else next(
            (one for _, one, *_ in reversed(self._open) if one is not None), None)
        code = frame.f_code
        self.returns.append(_Return(
            member, within, getattr(code, 'co_qualname', code.co_name),
            f'{code.co_filename}:{code.co_firstlineno}', begin, given, exact_digest(value), kept,
            tuple(dict.fromkeys(self._read))))

    def _member(self, frame: FrameType) -> int | None:
        code = frame.f_code
        if code in self._codes:
            return self._codes[code]
        if not code.co_argcount:
            return None
        return self._members.get(id(frame.f_locals.get(code.co_varnames[0])))


def explain(datasets: Sequence[Any], load: Callable[[], Any],
            load_another: Callable[[], Any]) -> list[str]:
    """Where two loads of a sample first differ, and what they read or found kept.

    Args:
        datasets: that the sample is asked from, the outermost first.
        load: loads the sample in question from its stream; draws and keeps what it likes.
        load_another: loads another one.

    Returns:
        Lines for a message.
    """
    named = [(f'{path} of {type(dataset).__name__}', one) for dataset in datasets
             for path, one in dataset_tree.transforms(getattr(dataset, 'pipeline', None))]
    named += [(type(dataset).__name__, dataset) for dataset in datasets]
    traces = []
    for _ in range(2):
        trace = _Trace([one for _, one in named])
        with trace.running():
            load()
        traces.append(trace.returns)
        load_another()
    one, other = traces
    # members only: the loads may call different functions between them (caches, garbage)
    first = next(((a, b) for a, b in zip(_of_members(one), _of_members(other)) if (
        a.member, a.given, a.result) != (b.member, b.given, b.result)), None)
    if first is None:
        return ['loaded twice more, the results agree: the first load has left something behind, '
                f'or something else than the sample came in. To do: {_fix([])}']
    return _describe(named, one, other, *first)


def _of_members(returns: Sequence[_Return]) -> list[_Return]:
    return [one for one in returns if one.member is not None]


def _describe(named: Sequence[tuple[str, Any]], one: Sequence[_Return], other: Sequence[_Return],
              a: _Return, b: _Return) -> list[str]:
    same_input = a.given == b.given
    # what a member is given comes from code that ran before it
    begin, other_begin = (a.begin, b.begin) if same_input else (0, 0)
    inner = next((x for x, y in zip(one[begin:], other[other_begin:])
                  if x is a or (x.member is None and (x.site, x.result) != (y.site, y.result))),
                 None)
    inner = None if inner is a else inner
    path, member = named[a.member]  # type: ignore[index]
    class_name = getattr(member, '__qualname__', type(member).__qualname__)
    what = 'the first result that differs is that of' if same_input else \
        'the first difference is in what reaches'
    site = method_site(member)
    lines = [f'{what} {class_name} ({path}{f", {site}" if site else ""})']
    if inner is not None:
        lines.append(f'within it: {inner.name} ({inner.site})' if same_input else
                     f'it comes from {inner.name} ({inner.site})')
    before = one[begin - 1].read if begin else ()
    read = [text for text in (inner or a).read if text not in before] or [
        text for text in a.read if text not in before]
    kept = [f'it keeps {name}: {a.kept.get(name, ("", "nothing"))[1]}, then '
            f'{b.kept.get(name, ("", "nothing"))[1]}'
            for name in dict.fromkeys([*a.kept, *b.kept])
            if a.kept.get(name, ('', ))[0] != b.kept.get(name, ('', ))[0]]
    lines += [f'it reads {text}' for text in read[:LINES]]
    lines += kept[:LINES]
    return [*lines, f'to do: {_fix([*read, *kept])}']


def _fix(seen: Sequence[str]) -> str:
    return next(fix for kind, fix in FIXES if not kind or any(kind in text for text in seen))


def method_site(thing: Any, methods: Sequence[str] = ('transform', '__call__', '__getitem__')
                ) -> str:
    """File and line of a function, or of the method of an object (or class) that does its work."""
    function = _function(thing)
    cls = thing if isinstance(thing, type) else type(thing)
    if not hasattr(function, '__code__'):
        function = next((vars(base)[name] for name in methods for base in cls.__mro__
                         if hasattr(vars(base).get(name), '__code__')), None)
    code = getattr(function, '__code__', None)
    return f'{code.co_filename}:{code.co_firstlineno}' if code else ''


def _function(thing: Any) -> Any:
    while isinstance(thing, functools.partial):
        thing = thing.func
    return thing.__func__ if isinstance(thing, MethodType) else thing


def _site(frame: FrameType) -> str:
    return f'{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}'


def _kept(member: Any) -> dict[str, tuple[str, str]]:
    """What a member, its classes and its functions keep between two calls."""
    found: dict[str, Any] = {}
    function = _function(member)
    owner = getattr(member, '__self__', member)
    functions = [function] if isinstance(function, FunctionType) else []
    for cls in type(owner).__mro__[:-1]:
        if belongs_to_user(cls.__module__):
            found.update({f'{cls.__qualname__}.{name}': value for name, value in vars(cls).items()
                          if not name.startswith('__')})
            functions += [value for value in vars(cls).values() if isinstance(value, FunctionType)]
    if not isinstance(owner, FunctionType):
        found.update({f'self.{name}': value for name, value in attributes(owner).items()})
    for one in functions:
        found.update(named_globals(one))
        found.update({f'{one.__qualname__}.{name}': value for name, value in closure(one)})
    return {name: _state(value) for name, value in found.items() if not _is_code(value)}


def _is_code(value: Any) -> bool:
    plain = isinstance(value, (list, tuple, dict, set, str, bytes)) or hasattr(value, 'dtype')
    is_data = not plain and hasattr(value, '__getitem__') and hasattr(value, '__len__')
    return isinstance(value, (type, ModuleType, FunctionType, MethodType, staticmethod,
                              classmethod, property)) or is_data


def _state(value: Any) -> tuple[str, str]:
    """Digest and short text of a value that is kept."""
    state = generator_states.own({'': value}).get('')
    if state is not None:
        return state, f'a generator in state {state}'
    if isinstance(value, (list, tuple, dict, set)):
        text = f'{type(value).__name__} of {len(value)}'
        if len(value) > MAX_KEPT:
            return text, text
    else:
        text = repr(value)
    digest = exact_digest(value)
    return digest, text if len(text) <= SHOWN else f'{type(value).__name__} {digest[:8]}'
