"""Who answers for ``mmcv._ext``: our PyTorch operators or mmcv's compiled ones.

``mmcv.ops`` reads one module, ``mmcv._ext``, and keeps hold of it. With mmcv-lite that module does
not exist; after :func:`install` the import system finds ours instead. With a compiled mmcv the
compiled module is imported as always, and :func:`use` puts our functions in place of its
attributes, one by one, and puts the compiled ones back.

Importing this module and calling :func:`install` costs microseconds: no torch, no mmcv.
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

__all__ = ['PROVIDERS', 'Entry', 'catalogue', 'install', 'installed', 'provider', 'provider_of',
           'uninstall', 'use', 'using']

EXTENSION = 'mmcv._ext'

# 'torch' is ours; 'triton' is ours with single kernels on CUDA where there are some; 'compiled' is
# whatever mmcv was built with.
PROVIDERS = ('torch', 'triton', 'compiled')

# The mark on the module that we make, so that it is never mistaken for a compiled one.
_MARK = '__mmrepro_operators__'

# Compiled functions that ours replaced, by name; None while the compiled module is as it came.
_replaced: Optional[Dict[str, Callable]] = None

# Whether operators that have a kernel in Triton use it on CUDA.
_fused = False


class Entry(NamedTuple):
    """One line of the catalogue.

    ``provider`` is 'torch', 'triton', 'compiled' or 'none'; ``deterministic`` is about that
    provider on the device asked for, and ``why`` gives its reason.
    """

    operator: str
    provider: str
    deterministic: bool
    why: str
    users: str
    source: str


def get_compiler_version() -> str:
    """What mmcv's environment report prints as its compiler: with us, there is none."""
    return 'none (PyTorch operators of mmrepro)'


def get_compiling_cuda_version() -> str:
    """What mmcv's environment report prints as its CUDA version; mmcv's own words for none."""
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
    """A function that finds its implementation on the first call, and keeps it."""

    @functools.cache
    def resolve(kernel: bool) -> Callable:
        return kernel and fused(name) or implementation(name) or _missing(name)

    def operator(*args: Any, **kwargs: Any) -> Any:
        return resolve(_fused)(*args, **kwargs)

    operator.__name__ = operator.__qualname__ = name
    operator.__doc__ = f'`{name}` in PyTorch; loaded on the first call.'
    return operator


class _Extension(ModuleType):
    """``mmcv._ext`` made of the table. Any public name exists: what is missing says so if called.

    A fork of mmcv may ask for names that this version has never heard of; importing it must not
    fail for an operator that nobody calls.
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
    """Finds ``mmcv._ext`` after every other finder has failed to."""

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> Any:
        if fullname != EXTENSION:
            return None
        return importlib.machinery.ModuleSpec(fullname, self, origin=f'{__name__} (PyTorch)')

    def create_module(self, spec: Any) -> ModuleType:
        module = _Extension(spec.name, 'mmcv operators in PyTorch, provided by mmrepro.')
        setattr(module, _MARK, True)
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Nothing to run: attributes are made when they are asked for."""


_finder = _Finder()


def install() -> None:
    """Make ``import mmcv._ext`` work without a compiled mmcv. Safe to call any number of times.

    The finder goes last, so a compiled ``mmcv._ext`` always wins.
    """
    if _finder not in sys.meta_path:
        sys.meta_path.append(_finder)


def uninstall() -> None:
    """Undo :func:`install` and :func:`use`.

    ``mmcv.ops`` modules that were imported in between keep the module that they hold; the next
    fresh import of ``mmcv._ext`` behaves as if mmrepro were not there.
    """
    _restore()
    if _finder in sys.meta_path:
        sys.meta_path.remove(_finder)
    module = sys.modules.get(EXTENSION)
    if module is not None and hasattr(module, _MARK):
        del sys.modules[EXTENSION]
        parent = sys.modules.get('mmcv')
        if getattr(parent, '_ext', None) is module:
            del parent._ext


def installed() -> bool:
    """Whether our finder stands behind the others."""
    return _finder in sys.meta_path


def _extension() -> ModuleType:
    try:
        return importlib.import_module(EXTENSION)
    except ModuleNotFoundError as error:
        if error.name != EXTENSION:
            raise
        raise ModuleNotFoundError(
            'mmcv has no compiled operators (mmcv-lite) and mmrepro does not provide them yet; '
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
    """One of :data:`PROVIDERS`: who answers at present. Imports mmcv if nothing has yet."""
    module = _extension()
    if _replaced is None and not hasattr(module, _MARK):
        return 'compiled'
    return 'triton' if _fused else 'torch'


def use(name: str) -> None:
    """Let ``name``, one of :data:`PROVIDERS`, answer for mmcv's operators from now on.

    With a compiled mmcv, 'torch' replaces the operators that we have and leaves the others
    compiled; 'compiled' puts all back. With mmcv-lite 'torch' is what you have. 'triton' is as
    'torch', but CUDA tensors go to the kernels of :mod:`mmrepro.ops.triton` where there are some.

    Raises:
        ValueError: ``name`` is none of them.
        RuntimeError: 'compiled' with mmcv-lite, which has nothing compiled; 'triton' without
            the package, or with one that is too old.
    """
    global _fused
    if name not in PROVIDERS:
        raise ValueError(f'unknown operator provider {name!r}; allowed: {", ".join(PROVIDERS)}')
    if name == 'triton' and requirement():
        raise RuntimeError(requirement())
    if name != 'compiled':
        install()
    module = _extension()
    if hasattr(module, _MARK):
        if name == 'compiled':
            raise RuntimeError(
                "operator provider 'compiled' was asked for, but this mmcv has no compiled "
                'operators (it is mmcv-lite): install a compiled mmcv, or use '
                "'torch'")
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
    """Who answers for one operator at present: 'torch', 'triton', 'compiled' or 'none'.

    Args:
        operator: its name in ``mmcv._ext``.
        device: 'cpu' or 'cuda', where the tensors are.

    Raises:
        KeyError: mmcv has no operator of that name.
    """
    if operator not in TABLE:
        raise KeyError(f'unknown operator {operator!r}; `mmrepro.ops.TABLE` has the names')
    module = _extension()
    ours = 'triton' if _fused and operator in FUSED and device != 'cpu' else 'torch'
    if _replaced is not None and operator in _replaced:
        return ours
    if hasattr(module, _MARK):
        return ours if implementation(operator) is not None else 'none'
    return 'compiled' if hasattr(module, operator) else 'none'


def catalogue(device: str = 'cpu') -> List[Entry]:
    """All operators with their provider, and whether that one is deterministic on ``device``.

    Args:
        device: 'cpu' or 'cuda'. mmcv's compiled kernels are single-threaded loops on the CPU and
            add with atomics on CUDA where the table says so.
    """
    entries = []
    for row in TABLE.values():
        who = provider_of(row.name, device)
        if who in ('torch', 'triton'):
            same, why = True, row.why
        elif who == 'none':
            same, why = False, 'not available here: raises when called'
        elif row.compiled == 'atomics' and device != 'cpu':
            same, why = False, 'adds floats with atomics, in the order in which threads arrive'
        else:
            same, why = True, 'compiled kernel without atomics'
        entries.append(Entry(row.name, who, same, why, row.users, f'mmcv/ops/{row.source}'))
    return entries
