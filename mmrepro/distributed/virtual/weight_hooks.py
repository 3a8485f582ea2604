"""Which hooks leave weights alone that virtual ranks share, and how the others take part."""
from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Callable, NamedTuple

from mmengine.hooks import EMAHook
from mmengine.model import BaseAveragedModel
from torch import Tensor

# package of a hook -> classes that change no weight; '*': all
KEEP_WEIGHTS: dict[str, Sequence[str]] = {
    'mmengine.hooks': (
        'CheckpointHook', 'DistSamplerSeedHook', 'EarlyStoppingHook', 'EmptyCacheHook',
        'IterTimerHook', 'LoggerHook', 'NaiveVisualizationHook', 'ParamSchedulerHook',
        'ProfilerHook', 'RuntimeInfoHook', 'SyncBuffersHook'),
    'mmdet.engine.hooks': (
        'CheckInvalidLossHook', 'DetVisualizationHook', 'GroundingVisualizationHook',
        'MemoryProfilerHook', 'NumClassCheckHook', 'PipelineSwitchHook', 'SetEpochInfoHook',
        'TrackVisualizationHook', 'YOLOXModeSwitchHook'),
    'mmrepro': ('*', ),  # tests/distributed/test_weight_hooks.py lists them
}


class Adapter(NamedTuple):
    """How a hook that changes weights takes part.

    Attributes:
        problem: (hook) -> why the hook cannot take part; ''.
        adapt: (hook, member, owner): replaces methods of the hook. The hook of the owner changes
            what is shared; those of other ranks leave it alone. ``member`` is a
            :class:`.shared_weights.Member`.
    """
    problem: Callable[[Any], str]
    adapt: Callable[[Any, Any, bool], None]


def _average_problem(hook: EMAHook) -> str:
    kind = type(hook.ema_model)
    if kind.update_parameters is not BaseAveragedModel.update_parameters:
        return f'the averaged model {kind.__name__} may change weights in a way of its own'
    return ''


def _adapt_average(hook: EMAHook, member: Any, owner: bool) -> None:
    """Average parameters once; buffers and their averages belong to each rank."""
    model = hook.ema_model
    update, swap = model.update_parameters, hook._swap_ema_parameters
    if not owner:
        parameters = {name for name, _ in model.module.named_parameters()}
        model.avg_parameters = {name: value for name, value in model.avg_parameters.items()
                                if name not in parameters}

        def swap() -> None:
            if model.update_buffers:
                for average, buffer in zip(model.module.buffers(), hook.src_model.buffers()):
                    value = average.data.clone()
                    average.data.copy_(buffer.data)
                    buffer.data.copy_(value)

    model.update_parameters = lambda source: member.changes(
        'the update of the averaged weights', lambda: update(source), weights=False)
    hook._swap_ema_parameters = lambda: member.changes(
        'the exchange of weights and averages', swap)


def _teacher_problem(hook: Any) -> str:
    return '' if hook.skip_buffers else 'MeanTeacherHook(skip_buffer=False) changes buffers as well'


def _adapt_teacher(hook: Any, member: Any, owner: bool) -> None:
    update = hook.momentum_update
    hook.momentum_update = lambda model, momentum: member.changes(
        "the update of the teacher's weights",
        (lambda: update(model, momentum)) if owner else lambda: None)


def _adapt_norms(hook: Any, member: Any, owner: bool) -> None:
    """Expect that weights change: the average of equal values rounds."""
    synchronise = hook.before_val_epoch

    def before_val_epoch(runner: Any) -> None:
        synchronise(runner)
        member.forget()

    hook.before_val_epoch = before_val_epoch


ADAPTERS: dict[tuple[str, str], Adapter] = {
    ('mmengine.hooks', 'EMAHook'): Adapter(_average_problem, _adapt_average),
    ('mmdet.engine.hooks', 'MeanTeacherHook'): Adapter(_teacher_problem, _adapt_teacher),
    ('mmdet.engine.hooks', 'SyncNormHook'): Adapter(lambda hook: '', _adapt_norms),
}


def _listed(hook: Any, package: str, names: Sequence[str]) -> bool:
    kind = type(hook)
    return f'{kind.__module__}.'.startswith(f'{package}.') and (
        '*' in names or kind.__name__ in names)


def _adapter(hook: Any) -> Adapter | None:
    return next((adapter for (package, name), adapter in ADAPTERS.items()
                 if _listed(hook, package, (name, ))), None)


def problem(hooks: Sequence[Any], vouched: bool = False) -> str:
    """Return why ranks with these hooks cannot share weights; '' if they can.

    Args:
        vouched: The user says that hooks which are not listed leave the weights alone.
    """
    for hook in hooks:
        adapter, name = _adapter(hook), type(hook).__name__
        if adapter is not None:
            text = adapter.problem(hook)
        elif not vouched and not any(_listed(hook, *row) for row in KEEP_WEIGHTS.items()):
            text = f'the hook {name} may change weights'
        else:
            text = f'{name} may keep averages in a way of its own' \
                if isinstance(hook, EMAHook) else ''
        if text:
            return text
    return ''


def averages(hooks: Sequence[Any]) -> dict[str, Tensor]:
    """Return the averaged parameters that hooks keep, by number of the hook and name."""
    return {f'{number} {name}': value for number, hook in enumerate(hooks)
            if isinstance(hook, EMAHook) and hasattr(hook, 'ema_model')
            for name, value in hook.ema_model.module.named_parameters()}


def adapt(hook: Any, member: Any, owner: bool) -> None:
    """Let a hook that changes weights do so once for all ranks of the process."""
    adapter = _adapter(hook)
    if adapter is not None:
        adapter.adapt(hook, member, owner)
