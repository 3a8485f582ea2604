"""Compare what user code builds with the same, built once more from the same random numbers.

A model, a dataset or a sampler whose code reads a clock, entropy or addresses differs in every run.
"""
from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import nn

from .digests import first_difference
from .errors import BuildDiffersError
from .reachable import belongs_to_user

_PLAIN = (bool, int, float, complex, str, bytes)
_COMPARED = (*_PLAIN, list, tuple, dict, set, np.ndarray, torch.Tensor)
_SUBMODULES = ('_modules', '_parameters', '_buffers', '_params_init_info')


def is_by_user(thing: Any) -> bool:
    """Whether a class of a model, dataset or sampler is the user's."""
    parts = thing.modules() if isinstance(thing, nn.Module) else (thing, )
    return any(belongs_to_user(cls.__module__) for part in parts for cls in type(part).__mro__)


@contextmanager
def quiet() -> Iterator[None]:
    """Log nothing inside the block, in which something is built for the second time."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(before)


def compare(what: str, first: Any, second: Any, logger: logging.Logger) -> None:
    """Compare two models, datasets or samplers; ``what`` they are is for the message.

    A number or text that differs is a warning: it may be for a log only.

    Raises:
        BuildDiffersError: weights, arrays or containers differ; names the first one.
    """
    ours, others = content(first), content(second)
    for path in dict.fromkeys((*ours, *others)):
        value, other = ours.get(path), others.get(path)
        difference = first_difference(value, other, path)
        if difference is None:
            continue
        where, then, now = difference
        text = (f'the {what} {type(first).__name__} was built twice from the same config and the '
                f'same random numbers, and differs in {where}: {then}, then {now}')
        if not isinstance(value, _PLAIN):
            raise BuildDiffersError(
                f'{text}. So would the next run. Look for a clock, an unseeded generator, a '
                'process id or the order of a set in __init__, init_weights or load_data_list. To '
                'train without this check: randomness.self_checks=False')
        logger.warning(f'{text}. If the training reads it, the next run has different bits')


def content(thing: Any) -> dict[str, Any]:
    """Return weights and attributes by path."""
    if not isinstance(thing, nn.Module):
        return {name: value for name, value in getattr(thing, '__dict__', {}).items()
                if isinstance(value, _COMPARED) and not name.startswith('_mmrepro_')}
    return {**thing.state_dict(), **{
        f'{path or "model"}.{name}': value for path, module in thing.named_modules()
        for name, value in vars(module).items()
        if isinstance(value, _COMPARED) and name not in _SUBMODULES and 'hooks' not in name}}
