"""Install the kernels of the table at torch's dispatcher, and remove them."""
from __future__ import annotations

import functools
import importlib
import warnings
from typing import Any, Callable

import torch

from ...errors import DeterminismError
from ..kernel_library import KernelLibrary, overloads
from .table import REFUSED, REFUSED_SPARSE, ROUTED

_KEY = 'CPU'
_SPARSE = 'SparseCsrCPU'
_installed: list[KernelLibrary] = []  # one, or none


def _stock(operator: str, key: str = _KEY) -> Callable[..., Any]:
    """Return torch's own kernel of an operator."""
    kernel = torch.library.get_kernel(f'aten::{operator}', key)
    keys = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, key))
    return functools.partial(kernel.call_boxed, keys)


def _written(function: Callable[..., torch.Tensor], *args: Any, out: torch.Tensor | None = None,
             **kwargs: Any) -> torch.Tensor:
    """Write the result of a function to ``out``, or without it to the first argument."""
    result, target = function(*args, **kwargs), args[0] if out is None else out
    if not torch.can_cast(result.dtype, target.dtype):
        raise RuntimeError(f"result type {result.dtype} can't be cast to the desired output type "
                           f'{target.dtype}')
    if out is None and result.shape != target.shape:
        raise RuntimeError(f'output with shape {list(target.shape)} does not match the shape '
                           f'{list(result.shape)} of the result')
    return (target if out is None else target.resize_(result.shape)).copy_(result)


def _refuse(stock: Callable[..., Any], operator: str, kind: str, *args: Any,
            **kwargs: Any) -> Any:
    text = (f"aten::{operator} ({kind}) {{}} randomness.numerics.cpu='portable': MKL computes it, "
            'with other kernels on the CPUs of each maker.')
    if torch.get_deterministic_debug_mode() == 1:  # deterministic='warn'
        warnings.warn(text.format('is not portable, with'), stacklevel=1)
        return stock(*args, **kwargs)
    raise DeterminismError(
        text.format('is refused with') + " Use cpu='avx2' for the same bits among the CPUs of one "
        'maker, or compute it without this operator.')


def install() -> None:
    """Install all kernels.

    Raises:
        DeterminismError: this torch has no means to call the kernels that are replaced.
    """
    if installed():
        return
    if not hasattr(torch.library, 'get_kernel'):
        raise DeterminismError("randomness.numerics.cpu='portable' needs torch.library.get_kernel, "
                               f'which torch {torch.__version__} does not have; use cpu=\'avx2\'')
    library = KernelLibrary()
    _installed.append(library)
    try:
        for row in ROUTED:
            module, _, name = row.target.partition(':')
            function = functools.partial(
                getattr(importlib.import_module(f'{__package__}.{module}'), name),
                _stock(row.operator))
            library.put(row.operator, function, _KEY)
            for operator in filter(None, (row.out, row.in_place)):
                library.put(operator, functools.partial(_written, function), _KEY)
        for key, kinds in ((_KEY, REFUSED), (_SPARSE, REFUSED_SPARSE)):
            for name, kind in kinds.items():
                for operator in overloads(name):
                    if torch._C._dispatch_has_kernel_for_dispatch_key(f'aten::{operator}', key):
                        library.put(operator, functools.partial(
                            _refuse, _stock(operator, key), name, kind), key)
    except BaseException:
        uninstall()
        raise


def uninstall() -> None:
    """Undo :func:`install`."""
    while _installed:
        _installed.pop().close()


def installed() -> bool:
    """Whether the kernels are installed."""
    return bool(_installed)
