"""Models inside of wrappers; optimizer wrappers, schedulers and averages of a runner."""
from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, cast

from mmengine.hooks import EMAHook
from mmengine.model import BaseAveragedModel, is_model_wrapper
from mmengine.optim import OptimWrapper
from torch import nn

from ..objects.walks import MAX_ITEMS, has_class, keys_and_values


def unwrap(model: nn.Module) -> nn.Module:
    """Return the model inside of DistributedDataParallel; a model without a wrapper itself.

    A part of the user's model may be called ``module``, as that of a wrapper is.
    """
    return cast(nn.Module, model.module) if is_model_wrapper(model) else model


def class_of(module: nn.Module) -> type:
    """Return the class of a module, without what FSDP2 has mixed in."""
    kinds = type(module).__mro__
    return kinds[2] if kinds[1].__name__ == 'FSDPModule' else kinds[0]


def buffer_wrappers(model: nn.Module) -> dict[str, Any]:
    """Return the DistributedDataParallel in a model and around it, by path.

    One takes the buffers of rank 0 before a forward pass if the last pass has averaged gradients,
    ``require_forward_param_sync``: not within a cycle of accumulation.
    """
    return {path: module for path, module in model.named_modules()
            if hasattr(module, 'require_forward_param_sync')}


def is_compiled(model: nn.Module) -> bool:
    """Whether the ``train_step`` of a model is compiled, and with it what watches the step."""
    return hasattr(model.train_step, '_torchdynamo_orig_callable')


def names_of_parameters(model: nn.Module) -> dict[int, str]:
    """Return the names of a model's parameters, by id."""
    return {id(parameter): name for name, parameter in model.named_parameters()}


def takes_closure(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Whether an optimizer computes the losses itself, by the arguments of its hook before a step.

    LBFGS calls the closure, several times; gradients are none of this iteration before it.
    """
    closure = kwargs.get('closure', args[1] if len(args) > 1 else None)  # the first is itself
    return closure is not None


def optim_wrappers(optim_wrapper: Any) -> dict[str, Any]:
    """Return the wrappers of an ``OptimWrapperDict`` by name; a single wrapper has the name ''.

    Empty for the settings of a wrapper that is not built yet.
    """
    wrappers = getattr(optim_wrapper, 'optim_wrappers', {'': optim_wrapper})
    return {name: wrapper for name, wrapper in wrappers.items()
            if isinstance(wrapper, OptimWrapper)}


def param_schedulers(runner: Any) -> dict[str, list[Any]]:
    """Return the schedulers by the name of their wrapper in :func:`optim_wrappers`."""
    given = getattr(runner, 'param_schedulers', None) or []
    return given if isinstance(given, dict) else {'': given}


def numbered_hooks(hooks: Iterable[Any]) -> Iterator[tuple[str, int, Any]]:
    """Yield hooks with class name and number among hooks of that class.

    Hooks of other classes, which a config may gain, do not change a hook's number.
    """
    numbers: Counter[str] = Counter()
    for hook in hooks:
        name = type(hook).__name__
        yield name, numbers[name], hook
        numbers[name] += 1


def named_hooks(hooks: Iterable[Any]) -> Iterator[tuple[str, Any]]:
    """Name hooks by class and number in it: hooks of other classes change no name."""
    return ((f'hook:{name}:{number}', hook) for name, number, hook in numbered_hooks(hooks))


def ema_hooks(hooks: Iterable[Any]) -> list[EMAHook]:
    """Return the hooks that average weights, and put the averages into the model to evaluate it."""
    return [hook for hook in hooks if isinstance(hook, EMAHook)]


def held_averages(hooks: Iterable[Any]) -> dict[str, BaseAveragedModel]:
    """Return the averaged models that hooks hold, each once, such as ``'EMAHook.ema_model'``.

    They are attributes of a hook, or items of its lists, tuples and dicts.
    """
    found: dict[int, tuple[str, BaseAveragedModel]] = {}
    for name, number, hook in numbered_hooks(hooks):
        path = f'{name}#{number}' if number else name
        for attribute, value in list(vars(hook).items()):
            for place, item in nested_items(f'{path}.{attribute}', value):
                if isinstance(item, BaseAveragedModel):
                    found.setdefault(id(item), (place, item))
    return dict(found.values())


def nested_items(path: str, value: Any, depth: int = 3) -> Iterator[tuple[str, Any]]:
    """Yield the items of nested lists, tuples and dicts by path; another value yields itself.

    Long containers hold annotations, and yield nothing.
    """
    if not has_class(value):
        return
    if not depth or not isinstance(value, (list, tuple, dict, nn.ModuleList)):
        yield path, value
    elif len(value) <= MAX_ITEMS:
        for key, item in list(keys_and_values(value)):
            yield from nested_items(f'{path}.{key}', item, depth - 1)
