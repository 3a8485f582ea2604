"""The state of a run at one moment: tensors by name, and the numbers beside them."""
from __future__ import annotations

import os
from typing import Any, Dict, Iterator, List, Tuple

import torch

from ..distributed.unwrap import optim_wrappers, unwrap
from ..fingerprint import generator_states

__all__ = ['attributes', 'scalars', 'tensors']

# variables that change bits
VARIABLES = ('PYTHONHASHSEED', 'OMP_NUM_THREADS', 'MKL_NUM_THREADS', 'CUBLAS_WORKSPACE_CONFIG',
             'ATEN_CPU_CAPABILITY', 'MKL_CBWR', 'ONEDNN_MAX_CPU_ISA')
PLAIN = (bool, int, float, str)


def tensors(runner: Any) -> Dict[str, torch.Tensor]:
    """Parameters, gradients, buffers and the optimizer's tensors, by name."""
    model = unwrap(runner.model)
    found: Dict[str, torch.Tensor] = {}
    names = {}
    for name, parameter in model.named_parameters():
        found[f'parameter {name}'] = parameter.detach()
        names[id(parameter)] = name
        if parameter.grad is not None:
            found[f'gradient {name}'] = parameter.grad
    for name, buffer in model.named_buffers():
        found[f'buffer {name}'] = buffer
    for prefix, optimizer in _optimizers(runner):
        for parameter, state in optimizer.state.items():
            owner = names.get(id(parameter), 'of no parameter of the model')
            for key, value in state.items():
                if isinstance(value, torch.Tensor):
                    found[f'optimizer {prefix}{key} {owner}'] = value
    return found


def scalars(runner: Any) -> List[str]:
    """Settings of parameter groups, schedulers and loss scaling, as ``name=value``, exact."""
    found = []
    for prefix, optimizer in _optimizers(runner):
        for number, group in enumerate(optimizer.param_groups):
            found += [f'optimizer {prefix}group {number} {key}={value!r}'
                      for key, value in sorted(group.items()) if _is_plain(value)]
    schedulers = getattr(runner, 'param_schedulers', None) or []
    if isinstance(schedulers, dict):
        schedulers = [one for many in schedulers.values() for one in many]
    for number, scheduler in enumerate(schedulers):
        found += [f'{type(scheduler).__name__} {number} {key}={value!r}'
                  for key, value in sorted(vars(scheduler).items()) if _is_plain(value)]
    scaler = getattr(runner.optim_wrapper, 'loss_scaler', None)
    if scaler is not None and hasattr(scaler, 'state_dict'):
        found += [f'loss scaler {key}={value!r}' for key, value in scaler.state_dict().items()]
    return found


def attributes(runner: Any) -> List[str]:
    """What may explain a difference and is none, as ``name=value``: the process, and numbers,
    texts and generators in attributes of modules.
    """
    found = [f'threads={torch.get_num_threads()}',
             f'deterministic={torch.are_deterministic_algorithms_enabled()}',
             f'resumed={runner._resume}',
             f'validated={any(getattr(hook, "validated", False) for hook in runner.hooks)}',
             *(f'environment {name}={os.environ.get(name)}' for name in VARIABLES)]
    for path, module in unwrap(runner.model).named_modules():
        own = {**_of_classes(type(module)), **vars(module)}
        found += [f'{path}.{name}={value!r}' for name, value in sorted(own.items())
                  if _is_plain(value) and not name.startswith('_')]
        found += [f'{path}.{name}=generator {state}'
                  for name, state in generator_states.own(own).items()]
    return found


def _of_classes(cls: type) -> Dict[str, Any]:
    """What classes hold that are not torch's: where an attribute is until an instance sets it."""
    found: Dict[str, Any] = {}
    for base in reversed(cls.__mro__):
        if not base.__module__.startswith('torch.'):
            found.update(vars(base))
    return found


def _optimizers(runner: Any) -> Iterator[Tuple[str, torch.optim.Optimizer]]:
    for name, wrapper in optim_wrappers(runner.optim_wrapper).items():
        yield name and f'{name} ', wrapper.optimizer


def _is_plain(value: Any) -> bool:
    return value is None or isinstance(value, PLAIN) or (
        isinstance(value, (tuple, list)) and len(value) < 16 and all(map(_is_plain, value)))
