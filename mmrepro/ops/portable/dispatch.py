"""Install the kernels of the table at torch's dispatcher, and remove them."""
from __future__ import annotations

import dataclasses
import functools
import importlib
import warnings
from typing import Any, Callable

import torch

from ...errors import DeterminismError
from .table import REFUSED, REFUSED_SPARSE, ROUTED, Routed

_KEY = 'CPU'
_SPARSE = 'SparseCsrCPU'


@dataclasses.dataclass
class _Installed:
    """What is installed now."""

    library: Any = None  # owns the kernels


_installed = _Installed()


def _stock(operator: str, key: str = _KEY) -> Callable[..., Any]:
    """Return torch's own kernel of an operator."""
    kernel = torch.library.get_kernel(f'aten::{operator}', key)
    keys = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, key))
    return functools.partial(kernel.call_boxed, keys)


def _checked(result: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    if not torch.can_cast(result.dtype, target.dtype):
        raise RuntimeError(f"result type {result.dtype} can't be cast to the desired output type "
                           f'{target.dtype}')
    return result


def _to_out(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def kernel(*args: Any, out: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        result = _checked(function(*args, **kwargs), out)
        if out.shape != result.shape:
            out.resize_(result.shape)
        return out.copy_(result)

    return kernel


def _in_place(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def kernel(first: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        result = _checked(function(first, *args, **kwargs), first)
        if result.shape != first.shape:
            raise RuntimeError(f'output with shape {list(first.shape)} does not match the shape '
                               f'{list(result.shape)} of the result')
        return first.copy_(result)

    return kernel


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
    _installed.library = torch.library.Library('aten', 'IMPL')
    try:
        for row in ROUTED:
            _install(row)
        for key, kinds in ((_KEY, REFUSED), (_SPARSE, REFUSED_SPARSE)):
            for name, kind in kinds.items():
                for operator in _overloads(name, key):
                    _put(operator, functools.partial(_refuse, _stock(operator, key), name, kind),
                         key)
    except BaseException:
        uninstall()
        raise


def _overloads(name: str, key: str) -> list[str]:
    """Return the forms of an operator that torch has a kernel for."""
    packet = getattr(torch.ops.aten, name, None)
    operators = [name if overload == 'default' else f'{name}.{overload}'
                 for overload in (packet.overloads() if packet is not None else ())]
    return [operator for operator in operators
            if torch._C._dispatch_has_kernel_for_dispatch_key(f'aten::{operator}', key)]


def _install(row: Routed) -> None:
    module, _, name = row.target.partition(':')
    function = functools.partial(
        getattr(importlib.import_module(f'{__package__}.{module}'), name), _stock(row.operator))
    _put(row.operator, function)
    for operator, form in ((row.out, _to_out), (row.in_place, _in_place)):
        if operator:
            _put(operator, form(function))


def _put(operator: str, function: Callable[..., Any], key: str = _KEY) -> None:
    with warnings.catch_warnings():
        # torch warns once that a kernel is overridden, which is intended
        warnings.simplefilter('ignore', UserWarning)
        _installed.library.impl(operator, function, key, allow_override=True)


def uninstall() -> None:
    """Undo :func:`install`."""
    if _installed.library is not None:
        _installed.library._destroy()
    _installed.library = None


def installed() -> bool:
    """Whether the kernels are installed."""
    return _installed.library is not None
