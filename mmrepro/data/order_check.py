"""Compare the order of a sampler of the user with the one that a resumed run would have."""
from __future__ import annotations

import copy
import dataclasses
import itertools
from collections.abc import Iterator
from typing import Any, Callable

import numpy as np
import torch

from ..another_process import copied
from ..digests import exact_digest
from ..errors import SampleDiffersError
from ..generator_kinds import GENERATORS
from ..text import listed

_KEPT: tuple[Any, ...] = (bool, int, float, str, type(None), list, tuple, dict, set, np.ndarray,
                          torch.Tensor, *GENERATORS)


def checked_order(sampler: Any, order: Callable[[Any], Iterator[Any]], block: int
                  ) -> Iterator[Any]:
    """Yield the items of ``order(sampler)``, the first ``block`` after a comparison.

    They are compared with those of a copy, in which the attributes that earlier passes have changed
    are as before the first pass, as in a resumed run. What hooks set stays.

    Raises:
        SampleDiffersError: they differ; names the sampler and the attributes.
    """
    kept = _kept(sampler)
    start, changed = vars(sampler).setdefault('_mmrepro_start', (kept, set()))
    resumed = copy.copy(sampler)
    resumed._mmrepro_placement = dataclasses.replace(sampler._mmrepro_placement, history=None)
    for name in {**kept, **start}:
        source = start if name in changed else kept
        if name in source:
            setattr(resumed, name, copied(source[name]))
        else:
            vars(resumed).pop(name, None)
    expected = list(itertools.islice(order(resumed), block))
    items = order(sampler)
    first = list(itertools.islice(items, block))
    if first != expected:
        position = next((position for position, (ours, other) in enumerate(zip(first, expected))
                      if ours != other), min(len(first), len(expected)))
        reason = (f'earlier passes have changed {listed(sorted(changed))} of it, which no '
                  'checkpoint keeps: derive the order from the epoch (set_epoch)' if changed else
                  'the order was computed twice from the same random numbers: draw from the '
                  'global generators')
        raise SampleDiffersError(
            f'{sampler._mmrepro_stock.__name__}: a run that resumes in this pass has another '
            f'order of samples, from position {position} on. {reason[0].upper()}{reason[1:]}. To '
            'train without this check: randomness.self_checks.samples=0')
    now = _kept(sampler)
    changed.update(name for name in {**kept, **now}
                   if exact_digest(kept.get(name)) != exact_digest(now.get(name)))
    yield from first
    yield from items


def _kept(sampler: Any) -> dict[str, Any]:
    return {name: copied(value) for name, value in vars(sampler).items()
            if isinstance(value, _KEPT) and not name.startswith('_mmrepro_')}
