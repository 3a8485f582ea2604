"""Report third-party operators that run on CUDA and are not known to be deterministic.

``torch.use_deterministic_algorithms`` covers torch's own kernels only. A third-party kernel may add
with atomics, and no flag prevents it. The guard watches a training step and reports, once each and
with the module that called them:

* operators of a ``torch.library`` namespace that is not on the list, and those of torch itself of
  which no source says whether they are in order (:mod:`.aten.kernel_table`), seen at the
  dispatcher, in forward and backward;
* functions of compiled extensions that link against torch (pybind11 and the like), seen as the
  interpreter calls them;
* kernels written in Triton, seen when they are launched.

Watching costs about a tenth of a second per step, so only few steps are watched (see the hook). The
guard does not see kernels that are launched without torch and Triton (cupy, ctypes, numba), calls
from inside compiled code, extension functions that a backward pass on CUDA calls (it runs on a
thread of autograd; their forward is reported), and anything while another profiler is active. Of a
model under ``torch.compile`` only the calls are watched: a dispatcher mode would make it run
uncompiled, with different bits.
"""
from __future__ import annotations

import contextlib
import functools
import importlib.machinery
import mmap
import os
import re
import sys
from collections.abc import Iterable, Iterator
from types import FrameType
from typing import Any, Callable, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from .aten.kernel_table import family_of
from .operator_table import TABLE
from .provider import provider_of

# Namespaces of torch.library that torch itself registers, and ours: their operators alert under the
# deterministic flag, or are in order, but for what mmrepro.ops.aten calls unknown.
NAMESPACES = frozenset((
    'aten', 'prim', 'prims', 'rngprims', 'mmrepro',
    'quantized', 'quantized_decomposed',  # integers
    'profiler', 'debugprims',  # markers, no computation
    'higher_order',  # control flow, whose operators are seen one by one
    'inductor',  # compiled code, under the deterministic setting of inductor
    'c10d', '_c10d_functional', 'c10d_functional', 'symm_mem',  # collectives
    'mkldnn', 'mkl'))  # on a CPU

# Single operators that are deterministic: NMS reads a bit mask in order of the scores, forwards of
# RoI operators are ordered, and their backwards alert under the deterministic flag.
KNOWN = frozenset(('torchvision::nms', *(
    f'torchvision::{form}' for name in ('roi_align', 'roi_pool', 'ps_roi_align', 'ps_roi_pool')
    for form in (name, f'_{name}_backward'))))

# Products of torch that are in order for dense factors only.
_PRODUCTS = frozenset(('aten::mm', 'aten::addmm', 'aten::mv', 'aten::addmv'))

# A library that links against torch contains one of these names.
_MARKS = (b'libtorch', b'libc10', b'torch_python', b'c10.dll')


class UnknownOperator(NamedTuple):
    """An operator that is not known to be deterministic."""

    operator: str  # namespace::name, module.function or triton:module.kernel
    kind: str  # 'torch.library', 'extension' or 'triton'
    module: str  # path and class of the torch module that called it first; '' outside of one
    call_site: str  # file and line of the call

    def __str__(self) -> str:
        caller = f'module {self.module}' if self.module else 'no module (a loss, a hook, backward)'
        return (f'unknown operator {self.operator!r} ({self.kind}) ran on the device, called by '
                f'{caller} at {self.call_site}. It is not known to give the same bits on every '
                "run. If it does, list it in custom_hooks=[dict(type='OperatorGuardHook', "
                f'allow=[{self.operator!r}])]; if not, two runs may differ from here on.')


@functools.cache
def _links_torch(path: str) -> bool:
    """Whether a shared library links against torch."""
    try:
        with open(path, 'rb') as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return any(data.find(mark) >= 0 for mark in _MARKS)
    except (OSError, ValueError):  # gone since it was loaded, or empty
        return False


def extensions() -> set[str]:
    """Return names of the loaded third-party modules that are compiled against torch."""
    suffixes = tuple(importlib.machinery.EXTENSION_SUFFIXES)
    paths = {name: getattr(module, '__file__', None) for name, module in list(sys.modules.items())}
    return {name for name, path in paths.items()
            if isinstance(path, str) and path.endswith(suffixes)
            and not path.startswith(os.path.dirname(torch.__file__))
            and name.partition('.')[0] != 'torch' and _links_torch(path)}


def _ordered_operators() -> set[str]:
    """Return mmcv's operators whose compiled passes are all in order, by their reported names.

    A backward runs on a thread of autograd, where the guard does not see it; so a forward is
    reported too, unless the backward was replaced.
    """
    def operator(name: str) -> str:
        return re.split('_(?:forward|backward)', name)[0]

    atomic = {operator(name) for name, row in TABLE.items() if row.compiled in ('atomics', 'races')
              and ('mmcv._ext' not in sys.modules or provider_of(name, 'cuda') == 'compiled')}
    return {f'mmcv._ext.{name}' for name in TABLE if operator(name) not in atomic}


class _Dispatch(TorchDispatchMode):
    def __init__(self, see: Callable[[Any, Any, Any], None]) -> None:
        super().__init__()
        self._see = see

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # else torch imports its compiler at the first operator, which takes seconds
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        self._see(func, args, kwargs)
        return func(*args, **kwargs)


class OperatorGuard:
    """Watches training steps and reports each unknown operator once.

    Args:
        model: its module paths appear in reports; None: class names only.
        devices: device types to watch.
        allow: further operators that are known to be deterministic, by their reported names;
            ``'namespace::*'`` and ``'module.*'`` stand for all of a namespace or module.
        report: called with each :class:`UnknownOperator`, once per operator.
    """

    def __init__(self, model: torch.nn.Module | None = None,
                 devices: Iterable[str] = ('cuda',), allow: Iterable[str] = (),
                 report: Callable[[UnknownOperator], None] | None = None) -> None:
        self.findings: list[UnknownOperator] = []
        self._paths = {} if model is None else {id(m): n for n, m in model.named_modules()}
        self._compiled = model is not None and any(
            getattr(module, '_compiled_call_impl', None) is not None
            or type(module).__name__ == 'OptimizedModule' for module in model.modules())
        self._devices = tuple(devices)
        self._allowed = {*KNOWN, *allow, *_ordered_operators()}
        self._report = report
        self._settled: set[Any] = set()  # operators already decided on
        self._extensions: set[str] = set()
        self._launch: Any = None

    @contextlib.contextmanager
    def watch(self) -> Iterator[OperatorGuard]:
        """Watch everything that this thread calls inside the block."""
        self._extensions = extensions()
        jit = sys.modules.get('triton.runtime.jit')
        self._launch = None if jit is None else jit.JITFunction.run.__code__
        # there can be one profiler only; another one stays
        profile = sys.getprofile() is None
        with contextlib.nullcontext() if self._compiled else _Dispatch(self._operator):
            if profile:
                sys.setprofile(self._called)
            try:
                yield self
            finally:
                if profile:
                    sys.setprofile(None)

    def watched(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call ``function`` and watch it."""
        with self.watch():
            return function(*args, **kwargs)

    def _operator(self, func: Any, args: Any, kwargs: Any) -> None:
        if func in self._settled:
            return
        namespace = func.namespace
        name = f'{namespace}::{func._schema.name.rpartition("::")[2]}'
        known = namespace in NAMESPACES and not self._unproved(name, args)
        if known and name in _PRODUCTS:
            return  # the next factors may be sparse
        if known or self._is_allowed(name, f'{namespace}::*'):
            self._settled.add(func)
        elif self._on_device((args, kwargs)):
            self._settled.add(func)
            self._found(name, 'torch.library', sys._getframe(2))

    @staticmethod
    def _unproved(name: str, args: Any) -> bool:
        """Whether no source says that an operator of torch is in order."""
        namespace, _, packet = name.partition('::')
        family = family_of(packet) if namespace == 'aten' else None
        return family is not None and family.torch == 'unknown' or name in _PRODUCTS and any(
            isinstance(arg, torch.Tensor) and arg.layout != torch.strided for arg in args)

    def _called(self, frame: FrameType, event: str, arg: Any) -> None:
        if event == 'c_call':
            module = getattr(arg, '__module__', None)
            if module in self._extensions:
                name = f'{module}.{arg.__name__}'
                if (name not in self._settled and self._on_device(list(frame.f_locals.values()))):
                    self._settled.add(name)
                    if not self._is_allowed(name, f'{module}.*'):
                        self._found(name, 'extension', frame)
        elif event == 'call' and frame.f_code is self._launch:
            self._launched(frame)

    def _launched(self, frame: FrameType) -> None:
        function = getattr(frame.f_locals.get('self'), 'fn', None)
        module = getattr(function, '__module__', '?')
        name = f'triton:{module}.{getattr(function, "__name__", "?")}'
        generated = str(module).startswith(('torch.', 'torchinductor', 'mmrepro.'))
        if name not in self._settled and not generated:
            self._settled.add(name)
            if not self._is_allowed(name, f'triton:{module}.*'):
                self._found(name, 'triton', frame.f_back or frame)

    def _is_allowed(self, name: str, family: str) -> bool:
        return name in self._allowed or family in self._allowed

    def _on_device(self, values: Any, depth: int = 3) -> bool:
        if isinstance(values, torch.Tensor):
            return values.device.type in self._devices
        if isinstance(values, dict):
            values = list(values.values())
        if depth and isinstance(values, (list, tuple)):
            return any(self._on_device(value, depth - 1) for value in values)
        return False

    def _found(self, operator: str, kind: str, frame: FrameType) -> None:
        finding = UnknownOperator(operator, kind, self._module(frame), _call_site(frame))
        if all(before.operator != operator for before in self.findings):
            self.findings.append(finding)
            if self._report is not None:
                self._report(finding)

    def _module(self, frame: FrameType | None) -> str:
        """Return the innermost torch module on the stack: 'path (Class)'."""
        while frame is not None:
            owner = frame.f_locals.get('self')
            if isinstance(owner, torch.nn.Module):
                return f'{self._paths.get(id(owner), "?")} ({type(owner).__name__})'
            frame = frame.f_back
        return ''


# Frames between an operator and the line that calls it.
_PASSED = (os.path.dirname(torch.__file__) + os.sep, __file__)


def _call_site(frame: FrameType) -> str:
    caller: FrameType | None = frame
    while caller is not None and caller.f_code.co_filename.startswith(_PASSED):
        caller = caller.f_back
    caller = caller or frame
    return f'{caller.f_code.co_filename}:{caller.f_lineno}'
