"""The choice among the implementations of an operator, and its reason."""
from __future__ import annotations

from typing import Any, NamedTuple

from . import triton
from .operator_table import TABLE, implementation

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
