"""Models inside of wrappers; optimizer wrappers and schedulers, inside of a dict or not."""
from __future__ import annotations

from typing import Any

from mmengine.optim import OptimWrapper
from torch import nn


def unwrap(model: nn.Module) -> nn.Module:
    """Return the model inside of DistributedDataParallel; a model without a wrapper itself."""
    return getattr(model, 'module', model)


def class_of(module: nn.Module) -> type:
    """Return the class of a module, without what FSDP2 has mixed in."""
    kinds = type(module).__mro__
    return kinds[2] if kinds[1].__name__ == 'FSDPModule' else kinds[0]


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
