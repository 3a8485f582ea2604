"""Fused Triton kernels of operators, for CUDA.

The PyTorch forms are the reference and the default. Some of them need hundreds of short calls and
several synchronisations on a GPU; these need one kernel or a few. Select them with
``randomness=dict(operators='triton')`` or ``mmrepro.ops.use('triton')``.

A kernel writes each output once, as a sum in a fixed order, without atomics. There are no fused
multiply-adds, and float32 divisions round correctly, so that decisions (which boxes overlap) are
those of a CPU. Each kernel accepts what its PyTorch form accepts, and delegates to it what it does
not implement.
"""
from __future__ import annotations

import functools
import importlib
import os
from typing import Any, Callable, Optional

from ..operator_table import implementation

__all__ = ['FUSED', 'fused', 'requirement', 'runs_on', 'version']

# Operators that have a kernel, and its module in this package.
FUSED = {
    'roi_align_forward': 'roi_align_kernels',
    'roi_align_backward': 'roi_align_kernels',
    'nms': 'nms_kernels',
    'ms_deform_attn_forward': 'attention_kernels',
    'ms_deform_attn_backward': 'attention_kernels',
}

# The first release with correctly rounded divisions and the language features of the kernels.
LEAST = (3, 0)


def version() -> Optional[str]:
    """The version of the installed Triton, or None."""
    from importlib import metadata  # not at the top: this package is imported with mmrepro
    try:
        return metadata.version('triton')
    except metadata.PackageNotFoundError:
        return None


def requirement() -> str:
    """What these kernels lack here, as a sentence; '' if nothing."""
    found = version()
    if found is None:
        return ("operators='triton' needs the package triton, which is not installed; it comes "
                'with the CUDA builds of torch: `pip install triton`, or leave operators out')
    if tuple(int(part) for part in found.split('.')[:2]) < LEAST:
        return (f"operators='triton' needs triton {'.'.join(map(str, LEAST))} or newer, and "
                f'{found} is installed')
    return ''


def runs_on(device: str) -> bool:
    """Whether kernels run on ``device``: on CUDA; with Triton's interpreter on any."""
    return device == 'cuda' or os.environ.get('TRITON_INTERPRET') == '1'


@functools.cache
def fused(name: str) -> Optional[Callable]:
    """Operator ``name`` with its kernel for CUDA tensors and the PyTorch form for others.

    None if it has no kernel. Triton is imported by the first call on CUDA.
    """
    if name not in FUSED:
        return None
    plain = implementation(name)

    @functools.cache
    def kernel() -> Callable:
        return getattr(importlib.import_module(f'{__name__}.{FUSED[name]}'), name)

    def operator(*args: Any, **kwargs: Any) -> Any:
        first = args[0] if args else next(iter(kwargs.values()))
        return (kernel() if runs_on(first.device.type) else plain)(*args, **kwargs)

    operator.__name__ = operator.__qualname__ = name
    operator.__doc__ = plain.__doc__
    return operator
