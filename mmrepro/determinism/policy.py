"""Reads the tables: check first, fill in what is missing second, flip the flags last.

Initial weights that nothing wrote are detected here as well: memory is filled with NaN while a
model is built.
"""
from __future__ import annotations

import ctypes
import importlib.util
import logging
import os
import sys
import threading
import warnings
from collections.abc import Iterable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager, suppress
from types import ModuleType
from typing import Any, NamedTuple

from ..errors import DeterminismError
from ..util.imports import after_import, forget
from .cpu_level import cpu_conflicts, level_variables
from .tables import (
    BIT_VARIABLES,
    ENV,
    FLAGS,
    RECORDED_FLAGS,
    UNAVAILABLE,
    UNREADABLE,
    Flag,
    Mode,
    PolicySettings,
    unchanged,
)

_logger = logging.getLogger('mmrepro')
_WHY = {**{row.name: row.why for row in ENV}, **{flag.name: flag.why for flag in FLAGS}}
_LATE_MODULES = tuple(dict.fromkeys(flag.module for flag in FLAGS if flag.module))

_WARN_IS_NOT_DETERMINISM = (
    "deterministic='warn' is not determinism: an operator without a deterministic form runs "
    'anyway, and attention keeps its non-deterministic backward kernels. Runs may differ. Set '
    'randomness=dict(deterministic=True) to have such an operator refused.')
_LATE = (
    'CUBLAS_WORKSPACE_CONFIG is not set and CUDA is in use already; cuBLAS may have read it. '
    'Export CUBLAS_WORKSPACE_CONFIG=:4096:8 before Python starts, or call enable() before the '
    'first use of CUDA. Accepted: :4096:8 | :16:8.')
_BENCHMARK = (
    "env_cfg.cudnn_benchmark=True with randomness.deterministic='warn': cuDNN chooses kernels by "
    'timing them, and runs may differ. Set env_cfg=dict(cudnn_benchmark=False).')
_NO_BENCHMARK = (
    'env_cfg.cudnn_benchmark=True is not followed: with randomness.deterministic=True cuDNN does '
    'not choose kernels by timing them, because runs would differ.')
_HASH_SEED = (
    'PYTHONHASHSEED is not set, so sets of strings have another order in every process. mmrepro '
    'keeps the order where MMDetection uses one; for code of your own, export PYTHONHASHSEED=0 '
    'before Python starts (mmrepro train does it by itself).')


class Change(NamedTuple):
    """A flag or variable that ``enable`` changed. ``None`` stands for a missing variable."""
    name: str
    before: Any
    after: Any
    why: str


class PolicyReport(NamedTuple):
    """The settings that ``enable`` put in force, the changes in order, and its warnings."""
    settings: PolicySettings
    changes: tuple[Change, ...] = ()
    warnings: tuple[str, ...] = ()

    def __str__(self) -> str:
        """Return a line for each change and each warning."""
        lines = [f'{change.name}: {_shown(change.before)} -> {_shown(change.after)} ({change.why})'
                 for change in self.changes]
        return '\n'.join([*lines, *self.warnings])


def _shown(value: Any) -> str:
    return 'not set' if value is None else str(value)


class _Saved(NamedTuple):
    env: MutableMapping[str, str]
    variables: dict[str, str | None]
    flags: dict[str, Any]


class _InForce(threading.local):
    """The policy in force: the state before it, and the report of ``enable``.

    Each virtual rank has a thread and enables for itself. A thread begins with what was put in
    force last, because most flags belong to the process.
    """
    latest: tuple[_Saved, PolicyReport] | None = None  # of the process

    def __init__(self) -> None:
        self.value = _InForce.latest

    def set(self, value: tuple[_Saved, PolicyReport] | None) -> None:
        self.value = _InForce.latest = value


_active = _InForce()
_said: set[Any] = set()  # warnings that were logged already


def enable(mode: Mode = True,
           *,
           float32_precision: str | None = None,
           num_threads: int | None = None,
           cudnn_benchmark: bool | None = None,
           cpu: str | None = None,
           env: MutableMapping[str, str] = os.environ) -> PolicyReport:
    """Put the policy in force; an earlier ``enable`` is undone first.

    Call it as early as possible: before CUDA is used and before processes are started. It imports
    nothing and starts no CUDA context. :class:`mmrepro.config.RandomnessConfig` checks the values.

    Args:
        mode: True refuses what cannot be deterministic; ``'warn'`` warns of it, keeps conflicting
            settings, and is no determinism; False leaves the deterministic switches alone. The
            other arguments apply in every mode. None leaves a setting as it is.
        float32_precision, num_threads: As in :class:`mmrepro.config.Numerics`. With ``mode``, the
            precision may not change from here on.
        cudnn_benchmark: What ``env_cfg`` of the config says. With ``mode=True``, True is not
            followed, with a warning.
        cpu: As in ``Numerics``. The process has to start with the variables of ``level_variables``;
            with ``'portable'``, this CPU has to give :mod:`mmrepro.ops.portable.known_answers`.
        env: The environment, changed in place.

    Returns:
        PolicyReport: every change relative to the state before.

    Raises:
        DeterminismError: settings that contradict each other, all in one message, with the values
            that are accepted. Nothing has been changed then, nor after any other error.
    """
    settings = PolicySettings(mode, float32_precision, num_threads, cudnn_benchmark, cpu)
    warned = _check_conflicts(settings, env)
    earlier, entry = _active.value, _save(env)
    disable()
    baseline = _save(env)
    try:
        for row in ENV:
            if row.default is not None and row.accepted(settings):
                env.setdefault(row.name, row.default)
        _set_flags(FLAGS, settings)
        if cpu == 'portable':
            from ..ops.portable import known_answers
            known_answers.check()
        before, after = ({**saved.variables, **saved.flags} for saved in (baseline, _save(env)))
        report = PolicyReport(settings, tuple(
            Change(name, before[name], after[name], _WHY[name]) for name in before
            if before[name] != after[name]), warned)
    except BaseException:
        _restore(entry)
        _put_in_force(earlier)
        raise
    _put_in_force((baseline, report))
    # `mmrepro train` sets it; of several ranks, the first one warns
    unseeded = mode and 'PYTHONHASHSEED' not in env
    for text in (*warned, *([_HASH_SEED] if unseeded and env.get('RANK', '0') == '0' else ())):
        if text not in _said:
            _said.add(text)
            _logger.warning(text)
    return report


def _put_in_force(policy: tuple[_Saved, PolicyReport] | None) -> None:
    _active.set(policy)
    for module in _LATE_MODULES if policy is not None else ():
        after_import(module, _set_late)


def disable() -> None:
    """Put back everything that ``enable`` changed. Does nothing if nothing is in force."""
    for module in _LATE_MODULES:
        forget(module, _set_late)
    active = _active.value
    if active is not None:
        _restore(active[0])
        _active.set(None)


def _set_flags(flags: Iterable[Flag], settings: PolicySettings) -> None:
    for flag in flags:
        wanted = flag.wanted(settings)
        if wanted and _read(flag.get) not in (*wanted, UNAVAILABLE):
            _write(flag, wanted[0])


def _set_late(module: ModuleType) -> None:
    """Set the flags that come with an import, after it."""
    report = in_force()
    if report is not None:
        _set_flags([flag for flag in FLAGS if flag.module], report.settings)


def import_flags() -> None:
    """Import the modules of torch that have flags, for threads that will set them.

    Some of these flags belong to a thread. Where a thread imports the module, only its own are set.
    """
    for module in _LATE_MODULES:
        importlib.import_module(module)


def is_enabled() -> Mode:
    """Return the mode in force: True, ``'warn'`` or False."""
    report = in_force()
    return False if report is None else report.settings.mode


def in_force() -> PolicyReport | None:
    """Return the report of the ``enable`` that counts; None if nothing is in force."""
    return None if _active.value is None else _active.value[1]


@contextmanager
def deterministic(mode: Mode = True,
                  *,
                  env: MutableMapping[str, str] = os.environ,
                  **settings: Any) -> Iterator[PolicyReport]:
    """Put the policy in force for the length of a block; takes the arguments of :func:`enable`.

    On the way out, also by an exception, every flag of the tables, and every variable that the
    policy may set, is as it was on the way in. Blocks nest; the innermost one counts.
    """
    outer, entry = _active.value, _save(env)
    try:
        yield enable(mode, env=env, **settings)
    finally:
        _restore(entry)
        _active.set(outer)


def snapshot(env: Mapping[str, str] = os.environ) -> dict[str, Any]:
    """Return the current value of each row of the tables: ``{'env.NAME': ..., 'torch....': ...}``.

    Plain strings, numbers, booleans and None, for a manifest and to compare ranks.
    """
    return {**{f'env.{name}': env.get(name) for name in BIT_VARIABLES},
            **{flag.name: _read(flag.get) for flag in FLAGS},
            **{name: _read(get) for name, get in RECORDED_FLAGS.items()}}


def drifted() -> tuple[Change, ...]:
    """Return flags that were changed since ``enable``, so that the promise no longer holds."""
    active, changes = _active.value, []
    if active is None:
        return ()
    saved, settings = active[0], active[1].settings
    for flag in FLAGS:
        wanted, now = flag.wanted(settings), _read(flag.get)
        if not wanted and flag.pinned and settings.mode:
            wanted = unchanged(saved.flags[flag.name])
        if wanted and now not in (*wanted, UNAVAILABLE):
            changes.append(Change(flag.name, wanted[0], now, flag.why))
    return tuple(changes)


def missing_at_start(env: Mapping[str, str] = os.environ,
                     *,
                     mode: Mode = True,
                     num_threads: int | None = None,
                     cpu: str | None = None) -> dict[str, str]:
    """Return variables that only count when Python starts with them, and that ``env`` lacks.

    For a script that starts itself again, once, with ``{**env, **missing_at_start(env)}``. The
    thread counts are those that torch has now, so that spelling them out changes no bit. The
    settings are those of :func:`enable`.
    """
    values: dict[str, str] = {}
    if mode or num_threads is not None:
        threads = env.get('OMP_NUM_THREADS') or str(num_threads or _torch_threads())
        values.update(OMP_NUM_THREADS=threads, MKL_NUM_THREADS=threads)
    if mode:
        values['PYTHONHASHSEED'] = '0'
    settings = PolicySettings(mode)
    values.update((row.name, row.default) for row in ENV
                  if row.at_start and row.default is not None and row.accepted(settings))
    values.update(level_variables(cpu, env))
    return {name: value for name, value in values.items() if name not in env}


def _torch_threads() -> int:
    """Return the number of threads of torch, without the seconds that importing it takes."""
    if 'torch' not in sys.modules:
        package = os.path.dirname(getattr(importlib.util.find_spec('torch'), 'origin', ''))
        with suppress(OSError, AttributeError):  # a build with other files is imported
            library = ctypes.CDLL(os.path.join(package, 'lib', 'libtorch_cpu.so'))
            return int(library._ZN2at15get_num_threadsEv())  # at::get_num_threads()
    import torch
    return torch.get_num_threads()


def _check_conflicts(s: PolicySettings, env: Mapping[str, str]) -> tuple[str, ...]:
    """Raise what contradicts ``s``; in ``'warn'`` mode, return it as warnings."""
    conflicts = [
        f'{row.name}={env[row.name]!r} is set in the environment, with deterministic={s.mode!r}, '
        f'float32_precision={s.float32_precision!r}: {row.why}. Unset {row.name}, or set one of: '
        f'{" | ".join(row.accepted(s))}.'
        for row in ENV if row.name in env and not row.accepts(env[row.name], s)]
    conflicts += cpu_conflicts(s.cpu, env)
    import torch
    if s.mode and 'CUBLAS_WORKSPACE_CONFIG' not in env and torch.cuda.is_initialized():
        conflicts.append(_LATE)
    if s.mode == 'warn':
        benchmark = (_BENCHMARK, ) if s.cudnn_benchmark else ()
        return (_WARN_IS_NOT_DETERMINISM, *conflicts, *benchmark)
    if conflicts:
        raise DeterminismError('\n'.join(conflicts))
    # many configs of MMEngine ask for both, and determinism wins there as well
    return (_NO_BENCHMARK, ) if s.mode and s.cudnn_benchmark else ()


def _read(get: Any) -> Any:
    with warnings.catch_warnings():
        # torch 2.9 warns that its old precision API, which every release has, will go
        warnings.simplefilter('ignore', UserWarning)
        try:
            return get()
        except (AttributeError, AssertionError):  # AssertionError: torch 2.0's cuBLAS switches
            return UNAVAILABLE
        except RuntimeError:
            return UNREADABLE


def _write(flag: Flag, value: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter('ignore', UserWarning)
        flag.set(value)


def _save(env: MutableMapping[str, str]) -> _Saved:
    # only variables that the policy may set: changes of others are not those of the policy
    return _Saved(env, {row.name: env.get(row.name) for row in ENV if row.default is not None},
                  {flag.name: _read(flag.get) for flag in FLAGS})


def _restore(saved: _Saved) -> None:
    for name, value in saved.variables.items():
        if value is None:
            saved.env.pop(name, None)
        else:
            saved.env[name] = value
    for flag in FLAGS:
        value = saved.flags[flag.name]
        if value == UNAVAILABLE and flag.later is not None and _read(flag.get) != UNAVAILABLE:
            value = flag.later(saved.env)
        if value not in (UNAVAILABLE, UNREADABLE) and _read(flag.get) != value:
            _write(flag, value)


@contextmanager
def filled_memory() -> Iterator[None]:
    """Let torch fill new memory with NaN in this block.

    Has an effect with deterministic algorithms only, and from torch 2.2 on.
    """
    import torch
    switches: Any = getattr(torch.utils, 'deterministic', None)
    before = getattr(switches, 'fill_uninitialized_memory', None)
    if before is None:
        yield
        return
    switches.fill_uninitialized_memory = True
    try:
        yield
    finally:
        switches.fill_uninitialized_memory = before


def unwritten(model: Any) -> list[str]:
    """Return names of the parameters and buffers that hold a NaN."""
    import torch
    from torch.nn.parameter import is_lazy
    with_nan = (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64,
                torch.complex128)
    return [name for named in (model.named_parameters(), model.named_buffers())
            for name, tensor in named
            if not is_lazy(tensor) and tensor.dtype in with_nan and bool(tensor.isnan().any())]
