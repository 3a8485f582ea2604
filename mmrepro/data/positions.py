"""Indices that carry their global position in the sample stream.

A sampler emits them, batch samplers pass them through untouched, and the worker that receives one
knows which stream of random numbers belongs to it.
"""
from __future__ import annotations

import operator
from typing import Any


class _Positioned:
    """An index with ``epoch`` and global ``position``; equal to the plain index."""
    epoch: int
    position: int

    def __new__(cls, index: Any, epoch: int, position: int) -> _Positioned:
        self = super().__new__(cls, index)
        self.epoch, self.position = epoch, position
        return self

    def __reduce__(self) -> tuple:
        return type(self), (plain(self), self.epoch, self.position)


class PositionedInt(_Positioned, int):
    """A dataset index."""


class PositionedTuple(_Positioned, tuple):
    """As :class:`PositionedInt`, for samplers whose index is a tuple (video, frame)."""


def with_position(index: Any, epoch: int, position: int) -> PositionedInt | PositionedTuple:
    """Attach a position to the index that a sampler yields.

    Raises:
        TypeError: when the sampler yields neither an integer nor a tuple.
    """
    if isinstance(index, tuple):
        return PositionedTuple(index, epoch, position)
    try:
        return PositionedInt(operator.index(index), epoch, position)
    except TypeError:
        raise TypeError(
            f'the sampler yields {index!r} of type {type(index).__name__}; sample streams need an '
            "int or a tuple. Use randomness.worker_seed='mmengine' for this data loader") from None


def plain(index: PositionedInt | PositionedTuple) -> int | tuple:
    """The index as the dataset knows it."""
    return tuple(index) if isinstance(index, tuple) else int(index)
