"""Hooks that write to weights which virtual ranks share, and how they take part.

All other hooks may read weights; the checksums of :mod:`.shared_weights` find those that write.
"""
from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, Callable, NamedTuple

from mmengine.hooks import EMAHook
from mmengine.model import BaseAveragedModel
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from ..distributed.unwrap import ema_hooks
from ..objects.digests import local_part
from ..util.libraries import belongs_to_user
from ..util.text import qualified_name
from .fsdp2 import is_sharded, part_of, whole_tensor


class Adapter(NamedTuple):
    """The functions by which a hook that changes weights takes part."""
    problem: Callable[[Any], str]  # returns why the hook cannot take part; ''
    # replaces methods of the hook, given a Member of :mod:`.shared_weights` and whether it is the
    # owner: the hook of the owner changes what is shared, those of other ranks leave it alone
    adapt: Callable[[Any, Any, bool], None]
    adapt_sharded: Callable[[Any], None] = lambda hook: None  # gives whole weights where needed


def _average_problem(hook: EMAHook) -> str:
    kind = type(hook.ema_model)
    if kind.update_parameters is not BaseAveragedModel.update_parameters:
        return f'the averaged model {kind.__name__} may change weights in a way of its own'
    return ''


def _adapt_average(hook: EMAHook, member: Any, owner: bool) -> None:
    """Average parameters once; buffers and their averages belong to each rank."""
    model = hook.ema_model
    update, swap = hook.after_train_iter, hook._swap_ema_parameters
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

    # before its first iteration, EMAHook copies the weights, on all ranks the same
    hook.after_train_iter = lambda *args, **kwargs: member.changes(
        'the update of the averaged weights', lambda: update(*args, **kwargs), ['average'])
    hook._swap_ema_parameters = lambda: member.changes(
        'the exchange of weights and averages', swap)


def _teacher_problem(hook: Any) -> str:
    return '' if hook.skip_buffers else 'MeanTeacherHook(skip_buffer=False) changes buffers as well'


def _adapt_teacher(hook: Any, member: Any, owner: bool) -> None:
    update = hook.momentum_update
    hook.momentum_update = lambda model, momentum: member.changes(
        "the update of the teacher's weights",
        (lambda: update(model, momentum)) if owner else lambda: None, ['parameter'])


def _adapt_sharded_teacher(hook: Any) -> None:
    """Gather the student's weights, one at a time; those of the teacher are frozen and whole."""
    update = hook.momentum_update

    def updated(model: Any, momentum: float) -> None:
        student = ((name, whole_tensor(value)) for name, value in model.student.named_parameters())
        update(SimpleNamespace(student=SimpleNamespace(named_parameters=lambda: student),
                               teacher=model.teacher), momentum)

    hook.momentum_update = updated


def _adapt_norms(hook: Any, member: Any, owner: bool) -> None:
    """Expect that weights change: the average of equal values rounds."""
    synchronize = hook.before_val_epoch
    hook.before_val_epoch = lambda runner: member.writes_on_every_rank(lambda: synchronize(runner))


def _adapt_sharded_norms(hook: Any) -> None:
    """Average the statistics, and copies of the weights."""
    synchronize = hook.before_val_epoch

    def synchronized(runner: Any) -> None:
        layers = [layer for layer in runner.model.modules() if isinstance(layer, _NormBase)]
        copies = nn.ModuleList(nn.BatchNorm2d(1) for _ in layers)
        for layer, whole in zip(layers, copies):
            whole._buffers = layer._buffers
            whole._parameters = {name: value if value is None else nn.Parameter(
                whole_tensor(value).detach().clone()) for name, value in layer.named_parameters()}
        synchronize(SimpleNamespace(model=copies))
        for layer, whole in zip(layers, copies):
            for name, value in layer.named_parameters():
                changed = getattr(whole, name).detach()
                local_part(value.detach()).copy_(
                    part_of(changed, value) if is_sharded(value) else changed)

    hook.before_val_epoch = synchronized


ADAPTERS: dict[str, Adapter] = {  # by path of the class
    'mmengine.hooks.ema_hook.EMAHook': Adapter(_average_problem, _adapt_average),
    'mmdet.engine.hooks.mean_teacher_hook.MeanTeacherHook': Adapter(
        _teacher_problem, _adapt_teacher, _adapt_sharded_teacher),
    'mmdet.engine.hooks.sync_norm_hook.SyncNormHook': Adapter(
        lambda hook: '', _adapt_norms, _adapt_sharded_norms),
}


def _other_problem(hook: Any) -> str:
    """Refuse classes derived from those that change weights."""
    kind = type(hook)
    return f'the hook {kind.__name__} may change weights in a way of its own' if any(
        qualified_name(base) in ADAPTERS for base in kind.__mro__) else ''


_OTHER = Adapter(_other_problem, lambda *args: None)


def adapter_of(hook: Any) -> Adapter:
    """Return the adapter of a hook; hooks that change no weights stay as they are."""
    return ADAPTERS.get(qualified_name(type(hook)), _OTHER)


def problem(hooks: Sequence[Any]) -> str:
    """Return why ranks with these hooks cannot share weights; '' if they can."""
    return next(filter(None, (adapter_of(hook).problem(hook) for hook in hooks)), '')


def averages(hooks: Sequence[Any]) -> dict[str, Tensor]:
    """Return the averaged parameters that a hook keeps; a run has at most one such hook."""
    return {name: value for hook in ema_hooks(hooks) if hasattr(hook, 'ema_model')
            for name, value in hook.ema_model.module.named_parameters()}


def of_users(hooks: Sequence[Any]) -> list[str]:
    """Return the classes of hooks that are not of a library."""
    return sorted({qualified_name(type(hook)) for hook in hooks
                   if belongs_to_user(type(hook).__module__)})
