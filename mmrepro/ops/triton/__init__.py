"""Operators as single kernels in Triton, for CUDA.

The PyTorch forms of :mod:`mmrepro.ops` are the reference and the default. On a GPU some of them are
hundreds of short calls with several waits of the host; those have a second form here, one kernel or
a few, chosen with ``randomness=dict(operators='triton')`` or ``mmrepro.ops.use('triton')``.

The rules are the same: a kernel writes each output once, as a sum in a fixed order, and never adds
with atomics. Products and sums are not contracted to fused multiply-adds, and float32 is divided
with correct rounding, so that what a kernel decides on (which boxes overlap) is what the CPU
decides. Every form is for inputs that its PyTorch form accepts, and passes on what it does not do.
"""
from __future__ import annotations

import functools
import importlib
import os
from typing import Any, Callable, Optional

from ..operator_table import implementation

__all__ = ['FUSED', 'fused', 'requirement', 'runs_on', 'version']

# Operators that have a kernel: module of this package and function.
FUSED = {
    'roi_align_forward': 'roi_align_kernels',
    'roi_align_backward': 'roi_align_kernels',
    'nms': 'nms_kernels',
    'ms_deform_attn_forward': 'attention_kernels',
    'ms_deform_attn_backward': 'attention_kernels',
}

# The first release with divisions that round correctly and with what the kernels are written in.
LEAST = (3, 0)


def version() -> Optional[str]:
    """The version of the installed Triton, if there is one."""
    from importlib import metadata  # not at the top: this package is imported with mmrepro
    try:
        return metadata.version('triton')
    except metadata.PackageNotFoundError:
        return None


def requirement() -> str:
    """What is missing for these kernels, in a sentence; '' if nothing is."""
    found = version()
    if found is None:
        return ("operators='triton' needs the package triton, which is not installed; it comes "
                'with the CUDA builds of torch: `pip install triton`, or leave operators out')
    if tuple(int(part) for part in found.split('.')[:2]) < LEAST:
        return (f"operators='triton' needs triton {'.'.join(map(str, LEAST))} or newer, and "
                f'{found} is installed')
    return ''


def runs_on(device: str) -> bool:
    """Whether kernels take tensors of ``device``: CUDA's; with Triton's interpreter all."""
    return device == 'cuda' or os.environ.get('TRITON_INTERPRET') == '1'


@functools.cache
def fused(name: str) -> Optional[Callable]:
    """Operator ``name`` with its kernel for CUDA tensors and the PyTorch form for all others.

    None where there is no kernel. Nothing of Triton is imported before the first call on CUDA.
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
