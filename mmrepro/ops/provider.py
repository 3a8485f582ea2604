"""The provider of ``mmcv._ext``: mmrepro's operators, mmcv's compiled ones, or some of both.

``mmcv.ops`` imports one module, ``mmcv._ext``. mmcv-lite does not have it; after :func:`install`
the import system finds mmrepro's module instead. A compiled mmcv is imported as always, and
:func:`use` replaces its attributes by mmrepro's functions, or restores them.

Importing this module and calling :func:`install` imports neither torch nor mmcv.
"""
from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import inspect
import logging
import pkgutil
import sys
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any, Callable, NamedTuple

from ..errors import OperatorProviderError
from ..util.imports import after_import, forget
from . import triton
from .operator_table import OF_FORKS, TABLE, by_device, implementation, named

# 'torch': mmrepro's operators in PyTorch, whose bits do not depend on how mmcv was installed;
# 'triton': the same, with fused kernels on CUDA where they exist; 'compiled': mmcv's own; 'auto':
# 'torch' on a CPU, and on CUDA for each operator the first of these that there is: mmcv's compiled
# kernel, if it adds in a fixed order, a kernel in Triton that a GPU has run, the form in PyTorch.
PROVIDERS = ('auto', 'torch', 'triton', 'compiled')
# The attribute that tells mmrepro's module from a compiled one.
MARK = '__mmrepro_operators__'
# Why a kind of compiled kernel is replaced.
_WHY_NOT = {'atomics': "mmcv's kernel adds with atomics", 'host': 'mmcv runs it on the CPU'}


class Choice(NamedTuple):
    """Who provides an operator on a device."""

    provider: str  # 'torch', 'triton', 'compiled' or 'none'
    reason: str


def compiled_kernels(extension: Any) -> str:
    """Return what ``mmcv._ext`` was compiled for: 'cuda', 'cpu', or '' if it is mmrepro's."""
    if hasattr(extension, MARK):
        return ''
    # mmcv's own words for a build without CUDA, and for one with ROCm
    return 'cpu' if 'not available' in extension.get_compiling_cuda_version() else 'cuda'


def choose(name: str, requested: str, device: str, kernels: str, lacks: str) -> Choice:
    """Choose the provider of operator ``name``, a key of the table.

    Args:
        requested: one of :data:`PROVIDERS`.
        device: 'cpu' or 'cuda', where the tensors are.
        kernels: what mmcv has, as :func:`compiled_kernels` says it.
        lacks: why kernels in Triton cannot run here; '' if they can.
    """
    kind = TABLE[name].compiled
    if requested == 'compiled' and kernels:
        return Choice('compiled', "mmcv's operators were asked for")
    if implementation(name) is None:
        return Choice('compiled', 'mmrepro has no form of it') if kernels else Choice(
            'none', 'mmrepro has no form of it, and this mmcv has no compiled operators')
    if device == 'cpu' or requested not in ('auto', 'triton'):
        return Choice('torch', 'the same bits with any mmcv')
    if requested == 'auto' and kernels == 'cuda' and kind == 'ordered':
        return Choice('compiled', "mmcv's kernel adds in a fixed order")
    why = f'{_WHY_NOT.get(kind, "mmcv has no CUDA kernels here")}; ' if requested == 'auto' else ''
    if name not in triton.FUSED:
        return Choice('torch', f'{why}there is no kernel in Triton')
    if requested == 'auto' and name not in triton.SEEN_ON_GPU:
        return Choice('torch', f'{why}no GPU has run its kernel in Triton')
    return Choice('torch', f'{why}{lacks}') if lacks else Choice('triton', f'{why}one kernel')


EXTENSION = 'mmcv._ext'
# mmcv's module whose form for CPUs does not call the operator, and the name of that form
_ATTENTION, _CPU_FORM = 'mmcv.ops.multi_scale_deform_attn', 'multi_scale_deformable_attn_pytorch'
# MMEngine's module for arguments that were renamed, and its name for inspect.getfullargspec
_RENAMED, _LOOK = 'mmengine.utils.misc', 'getfullargspec'
MAX_SIGNATURES = 1024  # functions whose signatures are remembered
# Why two runs of such a compiled kernel may differ on CUDA.
_VARIES = {'atomics': 'adds floats with atomics, in the order in which threads arrive',
           'races': 'threads write to shared memory in the order in which they arrive'}
_logger = logging.getLogger('mmrepro')


@dataclasses.dataclass
class _State:
    """What this process uses."""

    requested: str | None = None  # the argument of the last `use`; None before the first
    lacks: str = ''  # what the Triton kernels lack here; '' if nothing
    at_import: str | None = None  # what to use when `mmcv._ext` is imported
    # functions of a compiled mmcv that are replaced, by name
    compiled: dict[str, Callable[..., Any]] = dataclasses.field(default_factory=dict)
    attention: Callable[..., Any] | None = None  # mmcv's form for CPUs, where it is replaced
    reported: set[str] = dataclasses.field(default_factory=set)  # warnings that were logged


_state = _State()


def get_compiler_version() -> str:
    """Return the compiler for mmcv's environment report: there is none."""
    return 'none (PyTorch operators of mmrepro)'


def get_compiling_cuda_version() -> str:
    """Return the CUDA version for mmcv's environment report, in mmcv's own words."""
    return 'not available'


# ------------------------------------------------------------------------ functions of operators

def _missing(name: str) -> Callable[..., Any]:
    """Return a function that raises, for an operator without an implementation."""
    def operator(*args: Any, **kwargs: Any) -> None:
        row = TABLE.get(name)
        caller = f'mmcv/ops/{row.source}' if row else 'mmcv.ops'
        package, _, version = OF_FORKS.get(name, 'mmcv==2.1.0').partition('==')
        raise NotImplementedError(
            f'the operator {name!r} (called by {caller}) has no PyTorch implementation in mmrepro; '
            f'it needs a compiled {package}. Build one for your torch and CUDA: uninstall '
            'mmcv-lite, then `MMCV_WITH_OPS=1 pip install --no-build-isolation '
            f'"{package}=={version}"`, or take a wheel that matches both versions exactly.')

    return named(operator, name)


def _function(name: str, requested: str, lacks: str,
              compiled: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function of operator ``name``, which calls ``compiled`` where mmcv's is chosen."""
    module = sys.modules.get(EXTENSION)  # None after `uninstall`, for code that still refers to it
    kernels = '' if module is None else compiled_kernels(module)
    on_cpu, on_cuda = (choose(name, requested, device, kernels, lacks).provider
                       for device in ('cpu', 'cuda'))
    form = implementation(name)
    if form is None or on_cpu == 'compiled':
        return compiled
    if on_cuda == 'triton':
        return triton.fused(name)
    if on_cuda == 'torch':
        return form
    return by_device(name, lambda: compiled, lambda device: device == 'cuda')


def _late(name: str) -> Callable[..., Any]:
    """Return a function that imports its implementation on the first call."""
    if name not in TABLE:
        return _missing(name)
    resolve = functools.cache(functools.partial(_function, name, compiled=_missing(name)))

    def operator(*args: Any, **kwargs: Any) -> Any:
        return resolve(_state.requested or 'torch', _state.lacks)(*args, **kwargs)

    return named(operator, name, f'`{name}` in PyTorch; loaded on the first call.')


class _Extension(ModuleType):
    """``mmcv._ext`` made from the table.

    Every public name exists, and raises when it is called without an implementation. A fork of mmcv
    may import names that this version does not know; that must not fail.
    """

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name.startswith('_'):
            raise AttributeError(f'module {self.__name__!r} has no attribute {name!r}')
        operator = _late(name)
        setattr(self, name, operator)
        return operator

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *TABLE})


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds ``mmcv._ext`` if no other finder does."""

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> Any:
        if fullname != EXTENSION:
            return None
        return importlib.machinery.ModuleSpec(fullname, self, origin=f'{__name__} (PyTorch)')

    def create_module(self, spec: Any) -> ModuleType:
        module = _Extension(spec.name, 'mmcv operators in PyTorch, provided by mmrepro.')
        setattr(module, MARK, True)
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Execute nothing: attributes are created on access."""


finder = _Finder()


# -------------------------------------------------------------------------- installing, choosing

def install() -> None:
    """Make ``import mmcv._ext`` work without a compiled mmcv. Safe to call any number of times.

    The finder is the last one, so a compiled ``mmcv._ext`` takes precedence.
    """
    if finder not in sys.meta_path:
        sys.meta_path.append(finder)
    if not hasattr(pkgutil, 'find_loader'):  # Python 3.14 has removed what MMEngine 0.10.7 calls
        after_import('mmengine.utils.dl_utils.misc', _use_find_spec)
    after_import(_RENAMED, _look_once)
    module = sys.modules.get(EXTENSION)
    if hasattr(module, MARK) and not isinstance(module, _Extension):
        # `_mmrepro_operators` has provided it before mmrepro was imported; mmcv.ops refers to it
        for name in TABLE.keys() & vars(module):
            delattr(module, name)
        module.__class__ = _Extension


def _use_find_spec(module: ModuleType) -> None:
    module.pkgutil = SimpleNamespace(find_loader=importlib.util.find_spec)  # type: ignore


def _look_once(module: ModuleType) -> None:
    # functions of mmcv.ops look at their own signature at each call, which takes 0.1 ms
    if getattr(module, _LOOK) is inspect.getfullargspec:
        setattr(module, _LOOK, functools.lru_cache(MAX_SIGNATURES)(inspect.getfullargspec))


def uninstall() -> None:
    """Undo :func:`install` and :func:`use`.

    Modules of ``mmcv.ops`` that were imported before keep their reference; the next import of
    ``mmcv._ext`` behaves as if mmrepro were not installed.
    """
    forget(EXTENSION, _follow)
    _restore()
    forget(_RENAMED, _look_once)
    renamed = sys.modules.get(_RENAMED)
    if renamed is not None:
        setattr(renamed, _LOOK, inspect.getfullargspec)
    if finder in sys.meta_path:
        sys.meta_path.remove(finder)
    module = sys.modules.get(EXTENSION)
    if module is not None and hasattr(module, MARK):
        del sys.modules[EXTENSION]
        parent = sys.modules.get('mmcv')
        if parent is not None and getattr(parent, '_ext', None) is module:
            del parent._ext


def is_compiled() -> bool:
    """Whether the installed mmcv has compiled operators. Imports mmcv."""
    return not hasattr(_extension(), MARK)


def _extension() -> ModuleType:
    try:
        return importlib.import_module(EXTENSION)
    except ModuleNotFoundError as error:
        if error.name != EXTENSION:
            raise
        raise ModuleNotFoundError(
            'mmcv has no compiled operators (mmcv-lite), and mmrepro is not their provider; '
            'call mmrepro.ops.install() first', name=EXTENSION) from error


def _restore() -> None:
    """Give a compiled mmcv its own functions back."""
    module = sys.modules.get(EXTENSION)
    if module is not None:
        vars(module).update(_state.compiled)
    forget(_ATTENTION, _attend_with_operator)
    attention = sys.modules.get(_ATTENTION)
    if attention is not None and _state.attention is not None:
        setattr(attention, _CPU_FORM, _state.attention)
    _state.compiled, _state.requested, _state.attention = {}, None, None


def _attend_with_operator(module: ModuleType) -> None:
    from .mmcv.ms_deform_attn import on_cpu  # imports torch
    _state.attention = getattr(module, _CPU_FORM)
    setattr(module, _CPU_FORM,
            on_cpu(_state.attention, module.MultiScaleDeformableAttnFunction.apply))


def provider() -> str:
    """Return the argument of the last :func:`use`, else 'torch' or 'compiled'. Imports mmcv."""
    compiled = is_compiled()
    return _state.requested or ('compiled' if compiled else 'torch')


def _requirement(name: str) -> str:
    return triton.default_requirement() if name == 'auto' else triton.requirement()


def _lacking(name: str) -> str:
    """Return what the Triton kernels lack for provider ``name``; '' if nothing.

    Raises OperatorProviderError if there is no such provider, or it cannot run here.
    """
    if name not in PROVIDERS:
        raise OperatorProviderError(
            f'unknown operator provider {name!r}; allowed: {", ".join(PROVIDERS)}')
    lacks = _requirement(name)
    if name == 'triton' and lacks:
        raise OperatorProviderError(f"operators='triton': {lacks}")
    return lacks


def use(name: str) -> None:
    """Make ``name``, one of :data:`PROVIDERS`, the provider of mmcv's operators.

    Operators that mmrepro does not implement are always mmcv's.

    Raises:
        OperatorProviderError: ``name`` is not in :data:`PROVIDERS`; 'compiled' with mmcv-lite;
            'triton' where it cannot run.
    """
    lacks = _lacking(name)
    if name != 'compiled':
        install()
    compiled = is_compiled()
    if name == 'compiled' and not compiled:
        raise OperatorProviderError(
            "operator provider 'compiled': this mmcv has no compiled operators (it is mmcv-lite); "
            "install a compiled mmcv, or use 'torch'")
    _restore()
    if name != 'compiled' and compiled:
        module = sys.modules[EXTENSION]
        originals = {operator: getattr(module, operator) for operator, row in TABLE.items()
                     if row.source != 'info.py' and hasattr(module, operator)
                     and implementation(operator) is not None}
        functions = {operator: _function(operator, name, lacks, original)
                     for operator, original in originals.items()}
        _state.compiled = originals
        vars(module).update(functions)
    _state.requested, _state.lacks = name, lacks
    if name != 'compiled':
        after_import(_ATTENTION, _attend_with_operator)
    if name == 'auto' and triton.SEEN_ON_GPU and lacks and lacks not in _state.reported:
        import torch  # not at the top: this module is imported with mmrepro
        if torch.cuda.is_available():
            _state.reported.add(lacks)
            _logger.warning(
                f"operators='auto': PyTorch forms instead of kernels in Triton: {lacks}")


def use_from_import(name: str | None) -> None:
    """Call :func:`use` now, or as soon as ``mmcv._ext`` is imported; None changes nothing.

    Raises:
        OperatorProviderError: as :func:`use`, at once where nothing has to be imported for it.
    """
    _state.at_import = name
    if name is None:
        forget(EXTENSION, _follow)
        return
    _lacking(name)
    if name != 'compiled':
        install()
    after_import(EXTENSION, _follow)
    if EXTENSION not in sys.modules and 'mmcv.ops' in sys.modules:
        use(name)  # after `uninstall`: mmcv.ops refers to a module that nobody will import again


def _follow(module: ModuleType) -> None:
    if _state.at_import is not None:
        use(_state.at_import)


@contextlib.contextmanager
def using(name: str) -> Iterator[None]:
    """Call :func:`use` for a ``with`` block; the provider of before comes back, errors or not."""
    before = _state.requested
    use(name)
    try:
        yield
    finally:
        if before is None:
            _restore()
        else:
            use(before)


def takes_triton(kernel: str) -> bool:
    """Whether ``kernel`` of Triton, of an operator of torch, is chosen, and runs here."""
    wanted = _state.requested or _state.at_import
    if wanted == 'triton':
        return True  # what it lacks was an error
    return wanted == 'auto' and kernel in triton.SEEN_ON_GPU and not _requirement(wanted)


# ------------------------------------------------------------------------------------- reporting

def choice_of(operator: str, device: str, requested: str | None = None) -> Choice:
    """Return the provider of an operator on ``device`` ('cpu' or 'cuda'), and why.

    ``requested`` is one of :data:`PROVIDERS`, as if it were in use; None: the current one. Raises
    KeyError if mmcv has no operator of that name.
    """
    if operator not in TABLE:
        raise KeyError(f'unknown operator {operator!r}; `mmrepro.ops.TABLE` has the names')
    module = _extension()
    kernels = compiled_kernels(module)
    if not hasattr(module, operator):
        return Choice('none', 'this mmcv does not have it; '
                              f'{OF_FORKS.get(operator, "another version")} has')
    if kernels and TABLE[operator].source == 'info.py':
        return Choice('compiled', 'it describes the compiled operators')
    lacks = _state.lacks if requested is None else _requirement(requested)
    return choose(operator, requested or provider(), device, kernels, lacks)


def provider_of(operator: str, device: str = 'cpu') -> str:
    """Return the provider of :func:`choice_of`: 'torch', 'triton', 'compiled' or 'none'."""
    return choice_of(operator, device).provider


def other_providers(device: str) -> dict[str, str]:
    """Return 'triton' or 'compiled' for each operator that does not run its PyTorch form."""
    if provider() == 'compiled':
        return {}
    providers = {name: provider_of(name, device) for name, row in TABLE.items()
                 if row.source != 'info.py' and implementation(name) is not None}
    return {name: who for name, who in providers.items() if who not in ('torch', 'none')}


class CatalogueEntry(NamedTuple):
    """One operator of :func:`catalogue`."""

    operator: str
    provider: str  # 'torch', 'triton', 'compiled' or 'none'
    reason: str  # why this provider
    deterministic: bool  # whether it gives the same bits on every run on the requested device
    why: str
    users: str
    source: str


def catalogue(device: str = 'cpu', requested: str | None = None) -> list[CatalogueEntry]:
    """List all operators: the provider of each and why, and whether it is deterministic there.

    mmcv's compiled kernels are single-threaded loops on a CPU; on CUDA some add with atomics.

    Args:
        device: 'cpu' or 'cuda'.
        requested: one of :data:`mmrepro.ops.provider.PROVIDERS`, whose choices are shown; None: the
            current one.
    """
    entries = []
    for row in TABLE.values():
        who, reason = choice_of(row.name, device, requested)
        if who in ('torch', 'triton'):
            same, why = True, row.why
        elif who == 'none':
            same, why = False, 'not available here: raises when called'
        else:
            varies = '' if device == 'cpu' else _VARIES.get(row.compiled, '')
            same, why = not varies, varies or 'compiled kernel without atomics'
        entries.append(CatalogueEntry(row.name, who, reason, same, why, row.users,
                                      f'mmcv/ops/{row.source}'))
    return entries
