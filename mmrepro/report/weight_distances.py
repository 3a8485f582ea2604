"""Distances between the weights of two runs, from checkpoints that both wrote."""
from __future__ import annotations

import math
import re
from typing import Any, NamedTuple

import torch

from ..checkpoint.files import load
from ..errors import CheckpointError
from ..objects.digests import state_digest
from ..util.files import checked
from .run_view import RunView

_SHAPE = {'meta?': {'iter?': int}, 'state_dict?': {str: object}, str: object}
_NUMBERED = re.compile(r'(epoch|iter)_(\d+)\.pth')


class Distance(NamedTuple):
    """Weights of A and B in one pair of checkpoints."""
    name: str  # file name
    iteration: int | None  # iterations trained, from the checkpoint; None if it does not say
    # L2 norm of the difference over all floating-point tensors; None: see ``note``
    distance: float | None
    relative: float | None  # divided by the norm of A's
    # names and relative distances of the tensors that differ most
    largest: tuple[tuple[str, float], ...] = ()
    note: str = ''  # why there is no distance, or what is not in it
    same: bool = False  # whether all weights have the same bits


def checkpoint_distances(a: RunView, b: RunView) -> list[Distance]:
    """Compare the numbered checkpoints that both runs have, in the order of training."""
    numbered = {match[0]: int(match[2]) for match in map(_NUMBERED.fullmatch, a.checkpoints)
                if match and match[0] in b.checkpoints}
    rows = []
    for name in sorted(numbered, key=numbered.__getitem__):
        try:
            checkpoint_a, checkpoint_b = (
                checked(path, load(path), CheckpointError, _SHAPE)
                for path in (run.checkpoints[name] for run in (a, b)))
        except (CheckpointError, OSError) as error:
            rows.append(Distance(name, None, None, None, note=str(error).splitlines()[0]))
            continue
        iteration = checkpoint_a.get('meta', {}).get('iter')
        rows.append(distance(name, iteration, *(  # `meta` has the time
            checkpoint.get('state_dict', {**checkpoint, 'meta': None})
            for checkpoint in (checkpoint_a, checkpoint_b))))
    return rows


def distance(name: str, iteration: int | None, a: dict[str, Any],
             b: dict[str, Any]) -> Distance:
    """Compare two state dicts, in float64; equal bits (NaN as well) have distance 0."""
    squares = norms = 0.
    parts: dict[str, float] = {}
    left_out = sorted(set(a) ^ set(b))
    for key in a:
        tensor_a, tensor_b = a[key], b.get(key)
        if not (isinstance(tensor_a, torch.Tensor) and isinstance(tensor_b, torch.Tensor)):
            continue
        if tensor_a.shape != tensor_b.shape:
            left_out.append(key)
            continue
        tensor_a, tensor_b = tensor_a.double().flatten(), tensor_b.double().flatten()
        equal = (tensor_a == tensor_b) | (tensor_a.isnan() & tensor_b.isnan())
        gap = torch.where(equal, 0., tensor_a - tensor_b)
        square = float(gap.square().sum())
        squares, norms = squares + square, norms + float(tensor_a.square().sum())
        if square:
            parts[key] = math.sqrt(square) / (float(tensor_a.norm()) or 1.)
    note = f'not in both, or of another shape: {", ".join(left_out[:3])}' if left_out else ''
    largest = tuple(sorted(parts.items(), key=lambda item: -item[1])[:5])
    same = not squares and state_digest(a) == state_digest(b)
    if not (same or squares or note):
        note = 'equal values with different bits: the sign of zeros, or the payload of NaN'
    return Distance(name, iteration, math.sqrt(squares), math.sqrt(squares / norms) if norms else
                    0., largest, note, same)
