"""Explain why a sample has two results: load it again and trace every Python call."""
from __future__ import annotations

import functools
import gc
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from types import FrameType, MethodType
from typing import Any, Callable, NamedTuple

from ..data import dataset_tree
from ..data.dataset_changes import PASS, DatasetSnapshot, State
from ..fingerprint import generator_states
from ..fingerprint.generator_states import call_site
from ..fingerprint.operator_recorder import method_site
from ..objects.digests import exact_digest
from ..objects.walks import GENERATORS, PLAIN
from ..util.libraries import belongs_to_user

LOADS = 6  # traced at most, until two of them differ
SHOWN = 60  # characters of a value
LINES = 3  # of one kind in a message
LOADING = ('mmrepro.data.', 'mmrepro.selfcheck.')  # modules that call datasets
MAIN_METHODS = ('transform', 'forward', '__call__', '__getitem__')  # of modules, forward

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
    result: str = ''  # digest of the result
    read: tuple[str, ...] = ()  # reads of clock, entropy, ... until the return


class _Trace:
    """The calls of datasets, transforms and functions of the user while a sample is loaded."""

    def __init__(self, members: Sequence[Any], begin: Callable[[], None] | None) -> None:
        self._begin = begin  # called once, where the first member is called
        self._numbers = {id(member): number for number, member in enumerate(members)}
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
        given = ''
        if member is not None:
            begin, self._begin = self._begin, None
            if begin is not None:
                begin()
            values = [frame.f_locals.get(name) for name in code.co_varnames[:code.co_argcount]]
            given = exact_digest([value for value in values if id(value) not in self._numbers])
        self._open.append((frame, _Call(
            member, getattr(code, 'co_qualname', code.co_name),
            f'{code.co_filename}:{code.co_firstlineno}', len(self.returns), given)))

    def _number(self, frame: FrameType) -> int | None:
        code = frame.f_code
        if str(frame.f_globals.get('__name__')).startswith(LOADING):
            return None  # a function that is given a dataset, before its stream has begun
        if code in self._codes or not code.co_argcount:
            return self._codes.get(code)
        return self._numbers.get(id(frame.f_locals.get(code.co_varnames[0])))


def explain(datasets: Sequence[Any], load: Callable[[], Any],
            load_another: Callable[[], Any]) -> list[str]:
    """Return lines on where loads of a sample first differ, and which outside or kept values they
    read.

    The sample is loaded and traced until two loads differ, after the first time with other samples
    in between. If all loads agree, what they have read and what was kept is named all the same.

    Args:
        datasets: that load the sample, the outermost first.
        load: loads the sample from its stream.
        load_another: loads one or more other samples, those before it for example.
    """
    named = [(f'{path} of {type(dataset).__name__}', transform) for dataset in datasets
             for path, transform in dataset_tree.transforms(getattr(dataset, 'pipeline', None))]
    named += [(type(dataset).__name__, dataset) for dataset in datasets]
    members = [member for _, member in named]
    held: list[DatasetSnapshot] = []
    kept: list[list[str]] = [[] for _ in members]

    def look() -> None:
        """Note the state of members at the start of the stream, and the second time its changes.
        """
        if held:
            kept[:] = [_kept(snapshot) for snapshot in held]
        for member in members if not held else ():
            apart = [other for other in members if other is not member]
            held.append(DatasetSnapshot(member, 'self', PASS, apart, generators=True))

    runs: list[list[_Call]] = []
    for number in range(LOADS):
        trace = _Trace(members, look if number < 2 else None)
        with trace.running():
            load()
        runs.append(trace.returns)
        if number == 0:
            load_another()
            continue
        # members only: the loads may call different functions between them (caches, garbage)
        of_members = ([call for call in run if call.member is not None]
                      for run in (runs[0], runs[-1]))
        first = next(((a, b) for a, b in zip(*of_members) if (
            a.member, a.given, a.result) != (b.member, b.given, b.result)), None)
        if first is not None:
            differing = first[0].member or 0
            return _describe(*named[differing], kept[differing], (runs[0], runs[-1]), *first)
    return _suspects(named, kept, runs[-1])


def _kept(snapshot: DatasetSnapshot) -> list[str]:
    return [f'it keeps {path}: {_shown(before)}, then {_shown(now)}'
            for path, before, now in snapshot.changes()]


def _named(path: str, member: Any) -> str:
    site = _method_site(member)
    name = getattr(member, '__qualname__', type(member).__qualname__)
    return f'{name} ({path}{f", {site}" if site else ""})'


def _describe(path: str, member: Any, kept: Sequence[str], runs: Sequence[Sequence[_Call]],
              a: _Call, b: _Call) -> list[str]:
    same_input = a.given == b.given
    # a different input comes from code that ran before the member
    begin_a, begin_b = (a.begin, b.begin) if same_input else (0, 0)
    inner = next((x for x, y in zip(runs[0][begin_a:], runs[1][begin_b:])
                  if x is a or (x.member is None and (x.site, x.result) != (y.site, y.result))), a)
    difference = 'the first result that differs is that of' if same_input else \
        'the first difference is in what reaches'
    lines = [f'{difference} {_named(path, member)}']
    if inner is not a:
        relation = 'within it:' if same_input else 'it comes from'
        lines.append(f'{relation} {inner.name} ({inner.site})')
    before = runs[0][begin_a - 1].read if begin_a else ()
    read = [text for text in inner.read if text not in before] or [
        text for text in a.read if text not in before]
    return [*lines, *(f'it reads {text}' for text in read[:LINES]), *kept[:LINES],
            f'to do: {_fix([*read, *kept])}']


def _suspects(members: Sequence[tuple[str, Any]], kept: Sequence[Sequence[str]],
              run: Sequence[_Call]) -> list[str]:
    """Name the outside values that agreeing loads have read, and the state kept between them."""
    lines: list[str] = []
    observations: list[str] = []
    seen: set[str] = set()
    for number, (path, member) in enumerate(members):
        calls = [call for call in run if call.member == number]
        before = {text for call in calls if call.begin for text in run[call.begin - 1].read}
        read = [text for call in calls for text in call.read if text not in seen | before]
        found = [*(f'it reads {text}' for text in dict.fromkeys(read[:LINES])),
                 *kept[number][:LINES]]
        seen.update(read)
        if found:
            lines += [_named(path, member), *found]
            observations += found
    head = f'loaded {LOADS} times more, the results agree. What may differ elsewhere:'
    if not lines:
        head = (f'loaded {LOADS} times more, the results agree: something else than the sample '
                'came in')
    return [head, *lines, f'to do: {_fix(observations)}']


def _fix(observations: Sequence[str]) -> str:
    return next(fix for kind, fix in FIXES
                if not kind or any(kind in text for text in observations))


def _method_site(thing: Any) -> str:
    """Return file and line of a function, or of the main method of an object or class."""
    code = getattr(_function(thing), '__code__', None)
    if code:
        return f'{code.co_filename}:{code.co_firstlineno}'
    cls = thing if isinstance(thing, type) else type(thing)
    file, line, _ = method_site(cls, *MAIN_METHODS)
    return f'{file}:{line}' if file else ''


def _function(thing: Any) -> Any:
    while isinstance(thing, functools.partial):
        thing = thing.func
    return thing.__func__ if isinstance(thing, MethodType) else thing


def _shown(value: Any) -> str:
    """Return a short text of a value that an object has kept."""
    if isinstance(value, State):
        return value.text
    if isinstance(value, GENERATORS):
        return f'a {type(value).__name__}'
    if isinstance(value, (list, tuple, dict, set)):
        return f'{type(value).__name__} of {len(value)}'
    if isinstance(value, PLAIN) and len(repr(value)) <= SHOWN:
        return repr(value)
    digest = ''
    with suppress(Exception):  # an object of the user may not let itself be read
        digest = f' {exact_digest(value)[:8]}'
    return f'{type(value).__name__}{digest}'
