"""Record attributes and globals, which may explain a difference and are not compared."""
from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import nn

from ..determinism.tables import BIT_VARIABLES
from ..distributed.unwrap import named_hooks, optim_wrappers, unwrap
from ..facts.known_hooks import STATELESS, WATCHES, plays
from ..objects.digests import state_digest
from ..objects.walks import (
    CONTAINERS,
    GENERATORS,
    PLAIN,
    Walk,
    attributes,
    is_stateful,
    items,
    read_state,
)
from ..util.libraries import belongs_to_user, is_code_of_user
from ..util.scoped import stock_class
from .operator_recorder import OperatorRecorder
from .records import ATTRIBUTES

MAX_ITEMS = 2000  # of a container; of longer ones, the length counts
MAX_VALUES = 10_000  # of an owner; the nearest ones first
# attributes that torch and MMEngine keep for themselves
_MACHINERY = {'_parameters', '_buffers', '_modules', '_non_persistent_buffers_set', 'init_cfg',
              '_is_full_backward_hook', '_version', 'training', '_is_init', '_params_init_info'}
_OF_OTHERS = {'param_groups', 'state', 'defaults', 'sampler'}  # of optimizers and batch samplers


def record_attributes(recorder: OperatorRecorder, runner: Any) -> None:
    """Record facts of the process, attributes, and globals of the user's modules."""
    recorder.explanation('', ATTRIBUTES, labels=tuple(_of_process(runner)))
    # owners that other owners refer to
    known = [*unwrap(runner.model).modules(), runner, runner.model, runner.cfg, *runner.hooks]
    for path, prefix, owner, content in _owners(runner):
        cls = stock_class(owner)
        module = owner if isinstance(owner, ModuleType) else sys.modules.get(cls.__module__)
        file = getattr(module, '__file__', None) or ''
        recorder.explanation(
            path, ATTRIBUTES, stack=((file, 0, cls.__name__), ),
            labels=tuple(f'{prefix}{attribute}={value}'
                         for attribute, value in _values(content, known)))


def _of_process(runner: Any) -> list[str]:
    """Return facts of the process that may explain a difference, as ``name=value``."""
    return [f'threads={torch.get_num_threads()}',
            f'deterministic={torch.are_deterministic_algorithms_enabled()}',
            f'resumed={runner._resume}',
            f'validated={any(getattr(hook, "validated", False) for hook in runner.hooks)}',
            *(f'environment {name}={os.environ.get(name)}' for name in BIT_VARIABLES)]


def _owners(runner: Any) -> Iterator[tuple[str, str, Any, dict[str, Any]]]:
    """Yield path, prefix of its attributes, and content of what may keep state of a training."""
    for path, module in unwrap(runner.model).named_modules():
        yield f'model:{path}', f'{path or "model"}.', module, _with_class(module)
    batches = runner.train_dataloader.batch_sampler
    # attributes of hooks that watch (times, paths, counts) say what this process did, and the best
    # score of CheckpointHook is in the message hub
    things = [(name, hook) for name, hook in named_hooks(runner.hooks)
              if not plays(type(hook), WATCHES, STATELESS)]
    things += [('optimizer:', wrapper.optimizer)
               for wrapper in optim_wrappers(runner.optim_wrapper).values()]
    things += [('sampler:', batches), ('sampler:', getattr(batches, 'sampler', None))]
    for path, thing in things:
        yield path, f'{stock_class(thing).__name__}.', thing, {
            name: value for name, value in attributes(thing).items()
            if path.startswith('hook:') or name not in _OF_OTHERS}
    for name, module in list(sys.modules.items()):
        file = getattr(module, '__file__', None)
        if file and is_code_of_user(name, file):
            content = dict(vars(module))
            for cls in [value for value in content.values() if isinstance(value, type)]:
                if cls.__module__ == name:
                    content.update((f'{cls.__name__}.{key}', value)
                                   for key, value in vars(cls).items())
            yield f'global:{name}', f'global {name}:', module, content


def _with_class(module: nn.Module) -> dict[str, Any]:
    """Return attributes, with those that only the classes have yet."""
    classes = [vars(cls) for cls in type(module).__mro__[::-1] if belongs_to_user(cls.__module__)]
    return {name: value for content in (*classes, vars(module)) for name, value in content.items()}


def _values(content: Mapping[str, Any], known: Iterable[Any]) -> Iterator[tuple[str, str]]:
    """Yield path and text of the values that an owner holds, also in objects and containers."""
    walk = Walk(limit=MAX_VALUES, known=known)
    walk.queue.extend((name, value) for name, value in sorted(content.items())
                      if name not in _MACHINERY and not name.startswith(('__', '_mmrepro_'))
                      and not name.endswith(
                          ('_hooks', '_hooks_with_kwargs', '_hooks_always_called')))
    for path, value in walk:
        text = value_text(value)
        if text:
            yield path, text
        elif isinstance(value, CONTAINERS) and walk.is_new(value):
            yield f'len({path})', str(len(value))
            walk.queue.extend(items(value, path) if len(value) <= MAX_ITEMS else ())
        elif is_stateful(value) and walk.is_new(value):
            walk.queue.extend(named for named in items(attributes(value), path, attributes=True)
                              if '._mmrepro_' not in named[0])


def value_text(value: Any) -> str:
    """Return a plain value as it reads, of others a digest of their bits; '' for objects."""
    if isinstance(value, (*PLAIN, bytearray, np.generic)):
        return repr(value)
    if isinstance(value, torch.Tensor) and not isinstance(value, nn.Parameter):
        return f'tensor {tuple(value.shape)} {state_digest(value)[:16]}'
    if isinstance(value, np.ndarray):
        return f'array {value.shape} {state_digest(value.tolist())[:16]}'
    if isinstance(value, GENERATORS):
        return f'generator {state_digest(read_state(value))[:16]}'
    if isinstance(value, (set, frozenset)):
        return f'{len(value)} items {state_digest(value)[:16]}'
    return ''
