"""Compiled models: kernels must depend on the current sizes, not on earlier ones."""
from __future__ import annotations

import sys
from typing import Any

from ..errors import DeterminismError

_DYNAMIC = (
    'dynamic=True lets torch.compile tune kernels for all sizes to the size that comes first, so '
    'that a resumed run has other kernels, and different bits. Leave dynamic out: with '
    'randomness.deterministic=True every size gets kernels of its own')


def compiles(settings: Any) -> bool:
    """Whether MMEngine compiles the model for these ``compile`` settings of a config."""
    if isinstance(settings, dict):
        return not settings.get('disable', False)
    return bool(settings)


def check_compiled(model: Any, settings: Any, cpu: str | None = None) -> None:
    """Refuse what makes compiled kernels depend on the past of a run.

    Args:
        model: to be trained; parts of it may be compiled.
        settings: ``compile`` of the config: None, a bool, or arguments of ``torch.compile``.
        cpu: of ``numerics``.

    Raises:
        DeterminismError: names the setting or the module.
    """
    import torch
    if isinstance(settings, dict) and compiles(settings) and settings.get('dynamic'):
        raise DeterminismError(f'compile.dynamic={settings["dynamic"]!r}: {_DYNAMIC}')
    compiled = _compiled_modules(model)
    if compiles(settings):  # MMEngine compiles a method, later
        compiled.insert(0, ('compile', None))
    if not compiled:
        return
    if cpu == 'portable':
        raise DeterminismError(
            f'{compiled[0][0]}: torch.compile makes kernels for the CPU that it runs on. Use '
            "numerics=dict(cpu='portable') without it")
    for name, module in compiled:
        context = getattr(module, 'dynamo_ctx', None)
        if getattr(context, '_dynamic', getattr(context, 'dynamic', None)):
            raise DeterminismError(f'{name} is compiled: {_DYNAMIC}')
    if not _can_fail():
        raise DeterminismError(
            f'{compiled[0][0]}: torch {torch.__version__} runs a model uncompiled, without a word, '
            'when it was compiled for too many sizes. Use torch 2.6 or later, or do not compile '
            'with randomness.deterministic=True')


def _compiled_modules(model: Any) -> list[Any]:
    import torch
    dynamo = sys.modules.get('torch._dynamo.eval_frame')
    if dynamo is None or not isinstance(model, torch.nn.Module):
        return []
    return [(name or type(model).__name__, module) for name, module in model.named_modules()
            if isinstance(module, dynamo.OptimizedModule)]


def _can_fail() -> bool:
    import torch._dynamo.config as config
    return hasattr(config, 'fail_on_recompile_limit_hit')


# ------------------------------------------------------------------------------------------ scans

SCANS = 'torch._inductor.ir'  # takes seconds to import


def imported(module: str) -> Any:
    """Return a module of the compiler. Raises AttributeError while nothing has imported it."""
    if module not in sys.modules:
        raise AttributeError(f'{module} is not in use')
    return sys.modules[module]


def splits_scans() -> bool:
    """Whether inductor may split a scan into parts that wait for their neighbors."""
    return not hasattr(imported(SCANS).Scan.num_splits, 'stock')


def split_scans(wanted: bool) -> None:
    """Let inductor compile a scan as one part, or as it likes."""
    scan = imported(SCANS).Scan
    if wanted == splits_scans():
        return
    if wanted:
        scan.num_splits = scan.num_splits.stock
        return
    stock = vars(scan)['num_splits']

    def num_splits(cls: Any, *args: Any, **kwargs: Any) -> tuple[Any, int]:
        return stock.__get__(None, cls)(*args, **kwargs)[0], 1

    num_splits.stock = stock  # type: ignore[attr-defined]
    scan.num_splits = classmethod(num_splits)
