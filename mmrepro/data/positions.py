"""Indices that carry their global position in the sample stream.

A sampler emits them, batch samplers pass them through untouched, and the worker that receives one
knows which stream of random numbers belongs to it.
"""
from __future__ import annotations

import operator
from typing import Any, Tuple, Union

__all__ = ['PlacedInt', 'PlacedTuple', 'place', 'plain']


class PlacedInt(int):
    """A data set index with ``epoch`` and global ``position``; equal to the plain int."""
    epoch: int
    position: int

    def __new__(cls, index: int, epoch: int, position: int) -> PlacedInt:
        self = super().__new__(cls, index)
        self.epoch = epoch
        self.position = position
        return self

    def __reduce__(self):
        return PlacedInt, (int(self), self.epoch, self.position)


class PlacedTuple(tuple):
    """As :class:`PlacedInt`, for samplers whose index is a tuple (video, frame)."""
    epoch: int
    position: int

    def __new__(cls, index: Tuple, epoch: int, position: int) -> PlacedTuple:
        self = super().__new__(cls, index)
        self.epoch = epoch
        self.position = position
        return self

    def __reduce__(self):
        return PlacedTuple, (tuple(self), self.epoch, self.position)


def place(index: Any, epoch: int, position: int) -> Union[PlacedInt, PlacedTuple]:
    """Attach a place to the index that a sampler yields.

    Raises:
        TypeError: when the sampler yields neither an integer nor a tuple.
    """
    if isinstance(index, tuple):
        return PlacedTuple(index, epoch, position)
    try:
        return PlacedInt(operator.index(index), epoch, position)
    except TypeError:
        raise TypeError(
            f'the sampler yields {index!r} of type {type(index).__name__}; sample streams need an '
            "int or a tuple. Use randomness.worker_seed='mmengine' for this data loader") from None


def plain(index: Union[PlacedInt, PlacedTuple]) -> Union[int, Tuple]:
    """The index as the data set knows it."""
    return tuple(index) if isinstance(index, tuple) else int(index)
