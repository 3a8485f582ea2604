"""Explain why a sample has two results: load it twice more and trace every Python call."""
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
from .call_sites import method_site
from .generator_states import call_site

MAX_KEPT = 1000  # items of a list or dict that are compared; longer ones count by their length
SHOWN = 60  # characters of a value
LINES = 3  # of one kind in a message
MAIN_METHODS = ('transform', '__call__', '__getitem__')

# (observation, fix); the first row that fits counts
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


class _Call(NamedTuple):
    """A Python call of a dataset, a transform or a function of the user."""
    member: int | None  # number of the dataset or transform that was called; None: a function
    name: str
    site: str
    begin: int  # number of returns before the call
    given: str  # digest of the arguments of a member
    kept: dict[str, tuple[str, str]]  # values that a member kept before: name -> digest, text
    result: str = ''  # digest of the result
    read: tuple[str, ...] = ()  # reads of clock, entropy, ... until the return


class _Trace:
    """The calls of datasets, transforms and functions of the user while a sample is loaded."""

    def __init__(self, members: Sequence[Any]) -> None:
        self._numbers = {id(member): number for number, member in enumerate(members)}
        self._members = members
        self._codes = {code: number for number, member in enumerate(members)
                       for code in [getattr(_function(member), '__code__', None)] if code}
        self._open: list[tuple[FrameType, _Call]] = []
        self._watch = generator_states.Watch()
        self._read: list[str] = []
        self.returns: list[_Call] = []

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
            _, call = self._open.pop()
            self.returns.append(call._replace(result=exact_digest(value),
                                              read=tuple(dict.fromkeys(self._read))))
        elif event == 'c_call':
            self._watch.called(frame, event, value)
            self._read += self._watch.take()

    def _enter(self, frame: FrameType) -> None:
        code = frame.f_code
        if code.co_name == 'start' and code.co_filename.endswith('/threading.py') and frame.f_back:
            self._read.append(f'thread: started at {call_site(frame.f_back)}')
        member = self._number(frame)
        innermost = next((call.member for _, call in reversed(self._open)
                          if call.member is not None), None)
        if member == innermost:
            member = None
        if member is None and not belongs_to_user(frame.f_globals.get('__name__')):
            return
        given, kept = '', {}
        if member is not None:
            values = [frame.f_locals.get(name) for name in code.co_varnames[:code.co_argcount]]
            given = exact_digest([value for value in values if id(value) not in self._numbers])
            kept = _kept(self._members[member])
        self._open.append((frame, _Call(
            member, getattr(code, 'co_qualname', code.co_name),
            f'{code.co_filename}:{code.co_firstlineno}', len(self.returns), given, kept)))

    def _number(self, frame: FrameType) -> int | None:
        code = frame.f_code
        if code in self._codes or not code.co_argcount:
            return self._codes.get(code)
        return self._numbers.get(id(frame.f_locals.get(code.co_varnames[0])))


def explain(datasets: Sequence[Any], load: Callable[[], Any],
            load_another: Callable[[], Any]) -> list[str]:
    """Return lines on where two loads of a sample first differ, and what they read or found kept.

    ``datasets`` load the sample, the outermost first; ``load`` does so from its stream.
    """
    named = [(f'{path} of {type(dataset).__name__}', transform) for dataset in datasets
             for path, transform in dataset_tree.transforms(getattr(dataset, 'pipeline', None))]
    named += [(type(dataset).__name__, dataset) for dataset in datasets]
    runs = []
    for _ in range(2):
        trace = _Trace([member for _, member in named])
        with trace.running():
            load()
        runs.append(trace.returns)
        load_another()
    # members only: the loads may call different functions between them (caches, garbage)
    of_members = ([call for call in run if call.member is not None] for run in runs)
    first = next(((a, b) for a, b in zip(*of_members) if (
        a.member, a.given, a.result) != (b.member, b.given, b.result)), None)
    if first is None:
        return ['loaded twice more, the results agree: the first load has left something behind, '
                f'or something else than the sample came in. To do: {_fix([])}']
    return _describe(*named[first[0].member or 0], runs, *first)


def _describe(path: str, member: Any, runs: Sequence[Sequence[_Call]], a: _Call,
              b: _Call) -> list[str]:
    same_input = a.given == b.given
    # a different input comes from code that ran before the member
    begin_a, begin_b = (a.begin, b.begin) if same_input else (0, 0)
    inner = next((x for x, y in zip(runs[0][begin_a:], runs[1][begin_b:])
                  if x is a or (x.member is None and (x.site, x.result) != (y.site, y.result))), a)
    class_name = getattr(member, '__qualname__', type(member).__qualname__)
    difference = 'the first result that differs is that of' if same_input else \
        'the first difference is in what reaches'
    site = _method_site(member)
    lines = [f'{difference} {class_name} ({path}{f", {site}" if site else ""})']
    if inner is not a:
        relation = 'within it:' if same_input else 'it comes from'
        lines.append(f'{relation} {inner.name} ({inner.site})')
    before = runs[0][begin_a - 1].read if begin_a else ()
    read = [text for text in inner.read if text not in before] or [
        text for text in a.read if text not in before]
    nothing = '', 'nothing'
    kept = [f'it keeps {name}: {then}, then {now}' for name in dict.fromkeys([*a.kept, *b.kept])
            for (digest_a, then), (digest_b, now) in [(a.kept.get(name, nothing),
                                                       b.kept.get(name, nothing))]
            if digest_a != digest_b]
    return [*lines, *(f'it reads {text}' for text in read[:LINES]), *kept[:LINES],
            f'to do: {_fix([*read, *kept])}']


def _fix(observations: Sequence[str]) -> str:
    return next(fix for kind, fix in FIXES
                if not kind or any(kind in text for text in observations))


def _method_site(thing: Any) -> str:
    """Return file and line of a function, or of the main method of an object or class."""
    code = getattr(_function(thing), '__code__', None)
    file, line, _ = (code.co_filename, code.co_firstlineno, '') if code else method_site(
        thing if isinstance(thing, type) else type(thing), *MAIN_METHODS)
    return f'{file}:{line}' if file else ''


def _function(thing: Any) -> Any:
    while isinstance(thing, functools.partial):
        thing = thing.func
    return thing.__func__ if isinstance(thing, MethodType) else thing


def _kept(member: Any) -> dict[str, tuple[str, str]]:
    """Return the values that a member, its classes and its functions keep between two calls."""
    values: dict[str, Any] = {}
    function = _function(member)
    owner = getattr(member, '__self__', member)
    functions = [function] if isinstance(function, FunctionType) else []
    for cls in type(owner).__mro__[:-1]:
        if belongs_to_user(cls.__module__):
            values.update({f'{cls.__qualname__}.{name}': value for name, value in vars(cls).items()
                           if not name.startswith('__')})
            functions += [value for value in vars(cls).values() if isinstance(value, FunctionType)]
    if not isinstance(owner, FunctionType):
        values.update({f'self.{name}': value for name, value in attributes(owner).items()})
    for used in functions:
        values.update(named_globals(used))
        values.update({f'{used.__qualname__}.{name}': value for name, value in closure(used)})
    return {name: _state(value) for name, value in values.items() if not _is_code(value)}


def _is_code(value: Any) -> bool:
    plain = isinstance(value, (list, tuple, dict, set, str, bytes)) or hasattr(value, 'dtype')
    is_data = not plain and hasattr(value, '__getitem__') and hasattr(value, '__len__')
    return isinstance(value, (type, ModuleType, FunctionType, MethodType, staticmethod,
                              classmethod, property)) or is_data


def _state(value: Any) -> tuple[str, str]:
    """Return digest and short text of a value."""
    state = generator_states.kept_states({'': value}).get('')
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
