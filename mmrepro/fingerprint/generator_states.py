"""States of random generators, and calls for outside values: clock, entropy, listings."""
from __future__ import annotations

import ast
import functools
import gc
import itertools
import random
import sys
import tokenize
import zlib
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from ..objects.digests import state_digest
from ..objects.walks import GENERATORS, read_state
from ..util.libraries import belongs_to_user, is_machinery

NAMES = ('torch', 'numpy', 'python', 'cuda')  # of the global generators, in the order of states()

# functions whose values differ in every run, by what they read; the audit looks for them as well
CLOCK = ('time.time', 'time.time_ns', 'time.perf_counter', 'time.perf_counter_ns',
         'time.monotonic', 'time.monotonic_ns', 'time.process_time', 'datetime.datetime.now',
         'datetime.datetime.today', 'datetime.datetime.utcnow')
ENTROPY = ('os.urandom', 'os.getrandom')
PROCESS_ID = ('os.getpid', 'os.getppid')


# name of a C function -> what it reads; the interpreter reports calls to them, however imported
WATCHED = {
    # functions in C have their names without the module
    **{name.partition('.')[2]: what for what, names in (
        ('entropy of the operating system', ENTROPY), ('clock', CLOCK), ('process id', PROCESS_ID))
       for name in names},
    'Random.seed': 'a generator is seeded',
    'Generator.seed': 'entropy of the operating system',
    **dict.fromkeys(('clock_gettime', 'clock_gettime_ns', 'ctime', 'date.today', 'gmtime',
                     'localtime', 'process_time_ns', 'strftime', 'thread_time', 'thread_time_ns'),
                    'clock'),
    **dict.fromkeys(('listdir', 'scandir'), 'directory listing'),
    **dict.fromkeys(('randn', 'randu', 'randShuffle'), 'generator of OpenCV'),
    **dict.fromkeys(('start_new_thread', 'start_joinable_thread'), 'thread'),
}
# thin wrappers in the standard library: their caller counts
WRAPPERS = ('/random.py', '/secrets.py', '/glob.py', '/os.py', '/uuid.py')
# wrappers that start threads, and read the clock for themselves
THREAD_WRAPPERS = ('/threading.py', '/concurrent/futures/thread.py', '/multiprocessing/pool.py')
NUMPY_BITS = 128  # bits that NumPy's generators ask `secrets.randbits` for
CALLS_KEPT = 50  # between two records
FROM = ' from '  # in a call: between the line that asked and the line that called its function


def states() -> tuple[str, ...]:
    """Return the states of the global generators as short hex, in the order of :data:`NAMES`.

    No generator is advanced. Takes about 20 us.
    """
    numpy_state = np.random.get_state(legacy=False)
    inner = numpy_state['state']
    key = inner.get('key')
    numpy_bytes = repr(inner).encode() if key is None else key.tobytes() + b'%d' % inner['pos']
    # normal numbers are drawn in pairs, and the second is cached
    numpy_bytes += repr((numpy_state.get('has_gauss'), numpy_state.get('gauss'))).encode()
    _, words, cached = random.getstate()
    # hashes of numbers are the same in every process
    python_bytes = b'%d' % (hash(words) & (2 ** 64 - 1)) + repr(cached).encode()
    result = [of_torch(torch.default_generator), _short(numpy_bytes), _short(python_bytes)]
    if torch.cuda.is_initialized():
        result.append(_short(torch.cuda.get_rng_state().numpy().tobytes()))
    return tuple(result)


def of_torch(generator: torch.Generator) -> str:
    """Return the state of a generator as short hex."""
    return _short(generator.get_state().numpy().tobytes())


def kept_states(*namespaces: Mapping[str, Any]) -> dict[str, str]:
    """Return the generators in these namespaces: name -> state as short hex."""
    return {name: state_digest(read_state(value))[:8] for namespace in namespaces
            for name, value in list(namespace.items()) if isinstance(value, GENERATORS)}


def _short(data: bytes) -> str:
    return f'{zlib.crc32(data):08x}'


class Watch:
    """Notes calls of :data:`WATCHED` functions in this thread and block, with the calling line.

    Uses the profiling hook of the interpreter, unless another tool has set one. With ``only_user``,
    calls that libraries make for themselves are left out.
    """

    def __init__(self, only_user: bool = False) -> None:
        self._only_user = only_user
        self._calls: list[str] = []

    def __enter__(self) -> None:
        if sys.getprofile() is None:
            sys.setprofile(self.called)

    def __exit__(self, *args: Any) -> None:
        if sys.getprofile() == self.called:
            sys.setprofile(None)

    def take(self) -> tuple[str, ...]:
        """Return the calls since the last time."""
        calls, self._calls = self._calls, []
        return tuple(dict.fromkeys(calls))

    def called(self, frame: Any, event: str, function: Any) -> None:
        if event != 'c_call' or len(self._calls) >= CALLS_KEPT:
            return
        name = getattr(function, '__qualname__', None)
        if name not in WATCHED:
            return
        what, asking = WATCHED[name], frame
        wrappers = THREAD_WRAPPERS if what == 'thread' else WRAPPERS
        while frame is not None and frame.f_code.co_filename.endswith(wrappers):
            frame = frame.f_back
        if frame is None or is_machinery(frame.f_code.co_filename):
            return
        if name == 'Random.seed' and asking.f_locals.get('a') is None:
            what = WATCHED['urandom']
        elif name == 'urandom' and asking.f_locals.get('k') == NUMPY_BITS and _is_seeded(frame):
            return
        if self._only_user and not belongs_to_user(frame.f_globals.get('__name__', '')):
            return
        if not _is_collecting(frame):
            caller = f'{FROM}{call_site(frame.f_back)}' if frame.f_back is not None else ''
            self._calls.append(f'{what}: {name} at {call_site(frame)}{caller}')


def _is_seeded(frame: Any) -> bool:
    """Whether a frame makes a ``RandomState`` with a seed: it asks for entropy all the same."""

    def value(node: ast.expr) -> Any:
        if isinstance(node, ast.Attribute):
            return getattr(value(node.value), '__dict__', {}).get(node.attr, node)
        if isinstance(node, ast.Name):
            return {**frame.f_globals, **frame.f_locals}.get(node.id, node)
        return node.value if isinstance(node, ast.Constant) else node

    return any(value(call.func) is np.random.RandomState and value(given[0]) is not None
               for call in _calls_in(frame.f_code.co_filename)
               if _is_at(call, frame)
               for given in [[*call.args, *(keyword.value for keyword in call.keywords)]] if given)


def _is_at(call: ast.Call, frame: Any) -> bool:
    """Whether the instruction in progress is this call; before Python 3.11, whether its line is."""
    if sys.version_info < (3, 11):
        return call.lineno <= frame.f_lineno <= (call.end_lineno or 0)
    position: tuple[int | None, ...] = next(
        itertools.islice(frame.f_code.co_positions(), frame.f_lasti // 2, None))
    return (call.lineno, call.end_lineno, call.col_offset, call.end_col_offset) == position


@functools.lru_cache(maxsize=64)
def _calls_in(file: str) -> list[ast.Call]:
    try:
        with tokenize.open(file) as source:
            tree = ast.parse(source.read())
    except (OSError, SyntaxError, UnicodeDecodeError):  # generated code has no source
        return []
    return [node for node in ast.walk(tree) if isinstance(node, ast.Call)]


def call_site(frame: Any) -> str:
    """Return file, line and function that a Python frame runs."""
    return f'{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}'


def is_in(call: str, file: str, function: str) -> bool:
    """Whether this function made a call that was noted, or called the function that did."""
    sites = (site.rpartition(' in ') for site in call.split(': ', 1)[1].split(FROM))
    return any(name == function and start.rpartition(':')[0].rpartition(' at ')[2] == file
               for start, _, name in sites)


def _is_collecting(frame: Any) -> bool:
    """Whether garbage collection made the call: it runs at any time, and affects no value."""
    collecting = {getattr(callback, '__code__', None) for callback in gc.callbacks}
    while frame is not None:
        if frame.f_code in collecting or frame.f_code.co_name == '__del__':
            return True
        frame = frame.f_back
    return False
