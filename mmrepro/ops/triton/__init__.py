"""Fused Triton kernels of operators, for CUDA.

The PyTorch forms are the reference. Some of them need hundreds of short calls and several
synchronizations on a GPU; these need one kernel or a few. The provider 'triton' insists on them;
'auto' takes those of :data:`SEEN_ON_GPU` where :func:`default_requirement` is met.

A kernel adds floating-point numbers in a fixed order; only integers are added with atomics. There
are no fused multiply-adds, and float32 divisions round correctly, so that decisions (which boxes
overlap) are those of a CPU. Each kernel accepts what its PyTorch form accepts, and delegates to it
what it does not implement.
"""
from __future__ import annotations

import functools
import importlib
import os
import shutil
import sysconfig
from typing import Any, Callable

from ..operator_table import by_device

# Operators that have a kernel, and its module in this package.
FUSED = {
    'roi_align_forward': 'roi_align_kernels',
    'roi_align_backward': 'roi_align_kernels',
    'nms': 'nms_kernels',
    'ms_deform_attn_forward': 'attention_kernels',
    'ms_deform_attn_backward': 'attention_kernels',
}

# A kernel beside those of mmcv's operators: writes by index.
WRITES = '_index_put_impl_'
# Kernels, keys of FUSED or WRITES, that gave equal and right bits on a GPU, in a report of
# tools/gpu_check.py that is in docs/results. No GPU has run one yet.
SEEN_ON_GPU: frozenset[str] = frozenset()

# The first release with correctly rounded divisions and the language features of the kernels.
LEAST = (3, 0)
# The least compute capability that Triton supports officially.
CAPABILITY = (8, 0)


def version() -> str | None:
    """Return the version of the installed Triton, or None."""
    from importlib import metadata  # not at the top: this package is imported with mmrepro
    try:
        return metadata.version('triton')
    except metadata.PackageNotFoundError:
        return None


def requirement() -> str:
    """Return the requirement that these kernels lack here, as a sentence, or ''."""
    found = version()
    if found is None:
        return ('the package triton is not installed; it comes with the CUDA builds of torch: '
                '`pip install triton`')
    if tuple(int(part) for part in found.split('.')[:2]) < LEAST:
        return f"triton {'.'.join(map(str, LEAST))} or newer is needed, and {found} is installed"
    if os.environ.get('TRITON_INTERPRET') == '1':
        return ''
    if not (os.environ.get('CC') or shutil.which('gcc') or shutil.which('clang')):
        # Triton compiles the function that launches a kernel, at run time and for the host
        return 'Triton finds no C compiler; install gcc or clang, or set CC'
    header = os.path.join(sysconfig.get_paths()['include'], 'Python.h')
    if not os.path.exists(header):
        return (f'Triton needs the headers of Python, and there is no {header}; install the '
                'development package of this Python')
    return ''


def default_requirement() -> str:
    """Return :func:`requirement`, or that Triton does not support this kind of GPU officially."""
    import torch
    lacks = requirement()
    if lacks or not torch.cuda.is_available():
        return lacks
    if torch.version.hip is not None:
        return 'the kernels were written for NVIDIA GPUs'
    major, minor = torch.cuda.get_device_capability()
    if (major, minor) < CAPABILITY:
        return (f'compute capability {".".join(map(str, CAPABILITY))} or newer is needed, and this '
                f'GPU has {major}.{minor}')
    return ''


def runs_on(device: str) -> bool:
    """Whether kernels run on ``device``: on CUDA; with Triton's interpreter on any."""
    return device == 'cuda' or os.environ.get('TRITON_INTERPRET') == '1'


def well_aligned(*tensors: Any) -> list[Any]:
    """Return contiguous tensors that begin at a multiple of 16 bytes; copies where needed.

    Triton compiles another kernel for a pointer that is no such multiple, with another arrangement
    of numbers in threads, and with it another order of the sums across threads.
    """
    return [tensor.clone() if tensor.data_ptr() % 16 else tensor
            for tensor in (tensor.contiguous() for tensor in tensors)]


@functools.cache
def fused(name: str) -> Callable[..., Any]:
    """Return operator ``name`` with its kernel for CUDA tensors and the PyTorch form for others.

    ``name`` is a key of :data:`FUSED`. Triton is imported by the first call on CUDA.
    """
    @functools.cache
    def kernel() -> Callable[..., Any]:
        function: Callable[..., Any] = getattr(
            importlib.import_module(f'{__name__}.{FUSED[name]}'), name)
        return function

    return by_device(name, kernel, runs_on)
