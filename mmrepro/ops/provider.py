"""The provider of ``mmcv._ext``: mmrepro's PyTorch operators or mmcv's compiled ones.

``mmcv.ops`` imports one module, ``mmcv._ext``. mmcv-lite does not have it; after :func:`install`
the import system finds mmrepro's module instead. A compiled mmcv is imported as always, and
:func:`use` replaces its attributes by mmrepro's functions, or restores them.

Importing this module and calling :func:`install` imports neither torch nor mmcv.
"""
from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.abc
import importlib.machinery
import sys
from types import ModuleType
from typing import Any, Callable, Dict, Iterator, List, NamedTuple, Optional

from .operator_table import TABLE, implementation
from .triton import FUSED, fused, requirement

__all__ = ['MARK', 'PROVIDERS', 'CatalogueEntry', 'catalogue', 'install', 'installed', 'provider',
           'provider_of', 'uninstall', 'use', 'using']

EXTENSION = 'mmcv._ext'
# 'torch': mmrepro's operators; 'triton': the same, with fused kernels on CUDA where they exist;
# 'compiled': mmcv's own.
PROVIDERS = ('torch', 'triton', 'compiled')
# The attribute that tells mmrepro's module from a compiled one.
MARK = '__mmrepro_operators__'

# The compiled functions that were replaced, by name; None if none are.
_replaced: Optional[Dict[str, Callable]] = None

# Whether operators with a Triton kernel use it on CUDA.
_fused = False


class CatalogueEntry(NamedTuple):
    """One operator of :func:`catalogue`."""

    operator: str
    provider: str  # 'torch', 'triton', 'compiled' or 'none'
    deterministic: bool  # whether it gives the same bits on every run on the requested device
    why: str
    users: str
    source: str


def get_compiler_version() -> str:
    """The compiler in mmcv's environment report: there is none."""
    return 'none (PyTorch operators of mmrepro)'


def get_compiling_cuda_version() -> str:
    """The CUDA version in mmcv's environment report, in mmcv's own words."""
    return 'not available'


def _missing(name: str) -> Callable:
    def operator(*args: Any, **kwargs: Any) -> None:
        row = TABLE.get(name)
        caller = f'mmcv/ops/{row.source}' if row else 'mmcv.ops'
        raise NotImplementedError(
            f'the operator {name!r} (called by {caller}) has no PyTorch implementation in mmrepro; '
            'it needs a compiled mmcv. Build one for your torch and CUDA: uninstall mmcv-lite, '
            'then `MMCV_WITH_OPS=1 pip install --no-build-isolation "mmcv==2.1.0"`, or take a '
            'wheel that matches both versions exactly.')

    operator.__name__ = operator.__qualname__ = name
    return operator


def _late(name: str) -> Callable:
    """A function that imports its implementation on the first call."""

    @functools.cache
    def resolve(kernel: bool) -> Callable:
        return kernel and fused(name) or implementation(name) or _missing(name)

    def operator(*args: Any, **kwargs: Any) -> Any:
        return resolve(_fused)(*args, **kwargs)

    operator.__name__ = operator.__qualname__ = name
    operator.__doc__ = f'`{name}` in PyTorch; loaded on the first call.'
    return operator


class _Extension(ModuleType):
    """``mmcv._ext`` made from the table.

    Every public name exists, and raises when it is called without an implementation. A fork of mmcv
    may import names that this version does not know; that must not fail.
    """

    def __getattr__(self, name: str) -> Callable:
        if name.startswith('_'):
            raise AttributeError(f'module {self.__name__!r} has no attribute {name!r}')
        operator = _late(name)
        setattr(self, name, operator)
        return operator

    def __dir__(self) -> List[str]:
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
        """Nothing to execute: attributes are created on access."""


_finder = _Finder()


def install() -> None:
    """Make ``import mmcv._ext`` work without a compiled mmcv. Safe to call any number of times.

    The finder is the last one, so a compiled ``mmcv._ext`` takes precedence.
    """
    if _finder not in sys.meta_path:
        sys.meta_path.append(_finder)


def uninstall() -> None:
    """Undo :func:`install` and :func:`use`.

    Modules of ``mmcv.ops`` that were imported before keep their reference; the next import of
    ``mmcv._ext`` behaves as if mmrepro were not installed.
    """
    _restore()
    if _finder in sys.meta_path:
        sys.meta_path.remove(_finder)
    module = sys.modules.get(EXTENSION)
    if module is not None and hasattr(module, MARK):
        del sys.modules[EXTENSION]
        parent = sys.modules.get('mmcv')
        if getattr(parent, '_ext', None) is module:
            del parent._ext


def installed() -> bool:
    """Whether :func:`install` is in effect."""
    return _finder in sys.meta_path


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
    global _replaced
    module = sys.modules.get(EXTENSION)
    if _replaced is not None and module is not None:
        for name, compiled in _replaced.items():
            setattr(module, name, compiled)
    _replaced = None


def _replace(module: ModuleType) -> None:
    global _replaced
    ours = {name: implementation(name) for name, row in TABLE.items() if row.source != 'info.py'}
    names = [name for name in ours if ours[name] is not None and hasattr(module, name)]
    _replaced = {name: getattr(module, name) for name in names}
    for name in names:
        setattr(module, name, _fused and fused(name) or ours[name])


def provider() -> str:
    """The current provider, one of :data:`PROVIDERS`. Imports mmcv."""
    module = _extension()
    if _replaced is None and not hasattr(module, MARK):
        return 'compiled'
    return 'triton' if _fused else 'torch'


def use(name: str) -> None:
    """Make ``name``, one of :data:`PROVIDERS`, the provider of mmcv's operators.

    With a compiled mmcv, 'torch' replaces the operators that mmrepro implements and leaves the
    others compiled; 'compiled' restores all. With mmcv-lite the provider is always 'torch' or
    'triton'. 'triton' is 'torch' with the fused kernels of :mod:`mmrepro.ops.triton` for CUDA
    tensors where they exist.

    Raises:
        ValueError: ``name`` is not in :data:`PROVIDERS`.
        RuntimeError: 'compiled' with mmcv-lite; 'triton' if Triton is missing or too old.
    """
    global _fused
    if name not in PROVIDERS:
        raise ValueError(f'unknown operator provider {name!r}; allowed: {", ".join(PROVIDERS)}')
    if name == 'triton' and requirement():
        raise RuntimeError(requirement())
    if name != 'compiled':
        install()
    module = _extension()
    if hasattr(module, MARK):
        if name == 'compiled':
            raise RuntimeError(
                "operator provider 'compiled': this mmcv has no compiled operators (it is "
                "mmcv-lite); install a compiled mmcv, or use 'torch'")
        _fused = name == 'triton'
        return
    _restore()
    _fused = name == 'triton'
    if name != 'compiled':
        _replace(module)


@contextlib.contextmanager
def using(name: str) -> Iterator[None]:
    """:func:`use` for the length of a ``with`` block; what was before comes back, errors or not."""
    before = provider()
    use(name)
    try:
        yield
    finally:
        use(before)


def provider_of(operator: str, device: str = 'cpu') -> str:
    """The provider of an operator: 'torch', 'triton', 'compiled' or 'none'.

    ``device`` is 'cpu' or 'cuda', where the tensors are. Raises KeyError if mmcv has no operator of
    that name.
    """
    if operator not in TABLE:
        raise KeyError(f'unknown operator {operator!r}; `mmrepro.ops.TABLE` has the names')
    module = _extension()
    ours = 'triton' if _fused and operator in FUSED and device != 'cpu' else 'torch'
    if _replaced is not None and operator in _replaced:
        return ours
    if hasattr(module, MARK):
        return ours if implementation(operator) is not None else 'none'
    return 'compiled' if hasattr(module, operator) else 'none'


def catalogue(device: str = 'cpu') -> List[CatalogueEntry]:
    """All operators, their provider, and whether it is deterministic on ``device``.

    mmcv's compiled kernels are single-threaded loops on a CPU; on CUDA some of them add with
    atomics.
    """
    entries = []
    for row in TABLE.values():
        found = provider_of(row.name, device)
        if found in ('torch', 'triton'):
            same, why = True, row.why
        elif found == 'none':
            same, why = False, 'not available here: raises when called'
        elif row.compiled == 'atomics' and device != 'cpu':
            same, why = False, 'adds floats with atomics, in the order in which threads arrive'
        else:
            same, why = True, 'compiled kernel without atomics'
        entries.append(CatalogueEntry(row.name, found, same, why, row.users,
                                      f'mmcv/ops/{row.source}'))
    return entries
