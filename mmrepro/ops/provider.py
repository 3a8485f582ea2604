"""The provider of ``mmcv._ext``: mmrepro's operators, mmcv's compiled ones, or some of both.

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
import logging
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any, Callable

from ..imports import after_import, forget
from .choice import MARK, PROVIDERS, Choice, choose, compiled_kernels
from .operator_table import OF_FORKS, TABLE, implementation
from .triton import default_requirement, fused, requirement

EXTENSION = 'mmcv._ext'

_logger = logging.getLogger('mmrepro')
# The compiled functions that were replaced, by name; None if none are.
_replaced: dict[str, Callable] | None = None
# What :func:`use` was asked for last, and what kernels in Triton lack here; None: not asked.
_wanted: str | None = None
_lacks = ''
_at_import: str | None = None  # what to use when `mmcv._ext` is imported
_said: set[str] = set()  # lines that were logged already


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


def _form(name: str, wanted: str, lacks: str, compiled: Callable) -> Callable:
    """The function for operator ``name``; ``compiled`` is called where mmcv's own is chosen."""
    module = sys.modules.get(EXTENSION)  # None after `uninstall`, for who still refers to ours
    kernels = '' if module is None else compiled_kernels(module)
    chosen = choose(name, wanted, 'cuda', kernels, lacks).provider
    if chosen == 'none' or choose(name, wanted, 'cpu', kernels, lacks).provider == 'compiled':
        return compiled
    if chosen == 'triton':
        return fused(name)
    plain = implementation(name)
    if chosen == 'torch':
        return plain

    def operator(*args: Any, **kwargs: Any) -> Any:
        first = args[0] if args else next(iter(kwargs.values()))
        return (compiled if first.is_cuda else plain)(*args, **kwargs)

    operator.__name__ = operator.__qualname__ = name
    operator.__doc__ = plain.__doc__
    return operator


def _late(name: str) -> Callable:
    """A function that imports its implementation on the first call."""

    @functools.cache
    def resolve(wanted: str, lacks: str) -> Callable:
        missing = _missing(name)
        if name not in TABLE:
            return missing
        return _form(name, wanted, lacks, missing)

    def operator(*args: Any, **kwargs: Any) -> Any:
        return resolve(_wanted or 'torch', _lacks)(*args, **kwargs)

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
    forget(EXTENSION, _follow)
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
    global _replaced, _wanted
    module = sys.modules.get(EXTENSION)
    if _replaced is not None and module is not None:
        for name, compiled in _replaced.items():
            setattr(module, name, compiled)
    _replaced = _wanted = None


def _replace(module: ModuleType, wanted: str, lacks: str) -> None:
    global _replaced
    names = [name for name, row in TABLE.items() if row.source != 'info.py'
             and hasattr(module, name) and implementation(name) is not None]
    before = {name: getattr(module, name) for name in names}
    forms = {name: _form(name, wanted, lacks, before[name]) for name in names}
    _replaced = before
    for name, form in forms.items():
        setattr(module, name, form)


def provider() -> str:
    """What :func:`use` was asked for last, else 'torch' or 'compiled'. Imports mmcv."""
    module = _extension()
    return _wanted or ('torch' if hasattr(module, MARK) else 'compiled')


def _lacking(wanted: str) -> str:
    return default_requirement() if wanted == 'auto' else requirement()


def _checked(name: str) -> str:
    if name not in PROVIDERS:
        raise ValueError(f'unknown operator provider {name!r}; allowed: {", ".join(PROVIDERS)}')
    lacks = _lacking(name)
    if name == 'triton' and lacks:
        raise RuntimeError(f"operators='triton': {lacks}")
    return lacks


def use(name: str) -> None:
    """Make ``name``, one of :data:`PROVIDERS`, the provider of mmcv's operators.

    'torch': mmrepro's PyTorch forms; their bits do not depend on how mmcv was installed. 'triton':
    the same, with the fused kernels of :mod:`mmrepro.ops.triton` for CUDA tensors where they exist.
    'compiled': mmcv's own. 'auto': 'torch' on a CPU; on CUDA, for each operator, mmcv's compiled
    kernel if it adds in a fixed order, else a kernel in Triton, else the PyTorch form. Operators
    that mmrepro does not implement are always mmcv's.

    Raises:
        ValueError: ``name`` is not in :data:`PROVIDERS`.
        RuntimeError: 'compiled' with mmcv-lite; 'triton' where it cannot run.
    """
    global _wanted, _lacks
    lacks = _checked(name)
    if name != 'compiled':
        install()
    module = _extension()
    if name == 'compiled' and hasattr(module, MARK):
        raise RuntimeError(
            "operator provider 'compiled': this mmcv has no compiled operators (it is mmcv-lite); "
            "install a compiled mmcv, or use 'torch'")
    _restore()
    if name != 'compiled' and not hasattr(module, MARK):
        _replace(module, name, lacks)
    _wanted, _lacks = name, lacks
    if name == 'auto' and lacks and lacks not in _said and _cuda_is_there():
        _said.add(lacks)
        _logger.warning(f"operators='auto': PyTorch forms instead of kernels in Triton: {lacks}")


def _cuda_is_there() -> bool:
    import torch  # not at the top: this module is imported with mmrepro
    return torch.cuda.is_available()


def use_from_import(name: str | None) -> None:
    """:func:`use`, now or as soon as ``mmcv._ext`` is imported; None leaves the provider alone.

    Raises:
        ValueError, RuntimeError: as :func:`use`, at once where nothing has to be imported for it.
    """
    global _at_import
    _at_import = name
    if name is None:
        forget(EXTENSION, _follow)
        return
    _checked(name)
    if name != 'compiled':
        install()
    after_import(EXTENSION, _follow)
    if EXTENSION not in sys.modules and 'mmcv.ops' in sys.modules:
        use(name)  # after `uninstall`: mmcv.ops refers to a module that nobody will import again


def _follow(module: ModuleType) -> None:
    if _at_import is not None:
        use(_at_import)


@contextlib.contextmanager
def using(name: str) -> Iterator[None]:
    """:func:`use` for the length of a ``with`` block; what was before comes back, errors or not."""
    before = provider()
    use(name)
    try:
        yield
    finally:
        use(before)


def choice(operator: str, device: str, wanted: str | None = None) -> Choice:
    """Who provides an operator on ``device`` ('cpu' or 'cuda'), and why.

    ``wanted`` is one of :data:`PROVIDERS`, as if it were in use; None: the current one. Raises
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
    lacks = _lacks if wanted is None else _lacking(wanted)
    return choose(operator, wanted or provider(), device, kernels, lacks)


def provider_of(operator: str, device: str = 'cpu') -> str:
    """The provider of an operator: 'torch', 'triton', 'compiled' or 'none'.

    ``device`` is 'cpu' or 'cuda', where the tensors are. Raises KeyError if mmcv has no operator of
    that name.
    """
    return choice(operator, device).provider


def exceptions(device: str) -> dict[str, str]:
    """Operators that mmrepro implements and now leaves to 'triton' or 'compiled' on ``device``."""
    if provider() == 'compiled':
        return {}
    found = {name: provider_of(name, device) for name, row in TABLE.items()
             if row.source != 'info.py' and implementation(name) is not None}
    return {name: who for name, who in found.items() if who not in ('torch', 'none')}
