"""The state of a run at one moment: tensors and settings by name."""
from __future__ import annotations

from typing import Any

import torch

from ..distributed.unwrap import optim_wrappers, param_schedulers, unwrap
from ..fingerprint.snapshot import named_averages

PLAIN = (bool, int, float, str)
LONGEST = 15  # items of a list that is a plain value


def tensors(runner: Any) -> dict[str, torch.Tensor]:
    """Return parameters, gradients, buffers, and state of optimizers and averages, by name."""
    model = unwrap(runner.model)
    result: dict[str, torch.Tensor] = {}
    names = {}
    for name, parameter in model.named_parameters():
        result[f'parameter {name}'] = parameter.detach()
        names[id(parameter)] = name
        if parameter.grad is not None:
            result[f'gradient {name}'] = parameter.grad
    result.update((f'buffer {name}', buffer) for name, buffer in model.named_buffers())
    for prefix, optimizer in _optimizers(runner).items():
        for tensor, state in optimizer.state.items():
            owner = names.get(id(tensor), 'of no parameter of the model')
            for key, value in state.items():
                if isinstance(value, torch.Tensor):
                    result[f'{prefix}{key} {owner}'] = value
    result.update((f'average {name}', value) for name, value in named_averages(runner.hooks))
    return result


def numbers(runner: Any) -> list[str]:
    """Return the settings of parameter groups, schedulers and loss scaling, as ``name=value``."""
    settings = []
    for prefix, optimizer in _optimizers(runner).items():
        for number, group in enumerate(optimizer.param_groups):
            settings += _named(f'{prefix}group {number} ', group)
    for number, scheduler in enumerate(sum(param_schedulers(runner).values(), [])):
        settings += _named(f'{type(scheduler).__name__} {number} ', vars(scheduler))
    scaler = getattr(runner.optim_wrapper, 'loss_scaler', None)
    if scaler is not None and hasattr(scaler, 'state_dict'):
        settings += [f'loss scaler {key}={value!r}' for key, value in scaler.state_dict().items()]
    return settings


def _optimizers(runner: Any) -> dict[str, torch.optim.Optimizer]:
    """Return the optimizers by the prefix of their names in a record."""
    return {f'optimizer {name} ' if name else 'optimizer ': wrapper.optimizer
            for name, wrapper in optim_wrappers(runner.optim_wrapper).items()}


def _named(prefix: str, values: dict[str, Any]) -> list[str]:
    return [f'{prefix}{name}={value!r}' for name, value in sorted(values.items())
            if _is_plain(value)]


def _is_plain(value: Any) -> bool:
    return value is None or isinstance(value, PLAIN) or (
        isinstance(value, (tuple, list)) and len(value) <= LONGEST and all(map(_is_plain, value)))
