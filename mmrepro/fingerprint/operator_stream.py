"""The operators of an iteration, for its line in the fingerprint file."""
from __future__ import annotations

from collections import Counter
from typing import Any, Dict, List, Optional, Sequence

import torch

from .digest import combined_hex
from .operator_recorder import OperatorRecorder
from .records import Record
from .schema import OPERATORS

__all__ = ['OperatorLines']


class OperatorLines:
    """Watches a model; :meth:`start` and :meth:`stop` bound what is recorded."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model
        self._recorder: Optional[OperatorRecorder] = None

    def start(self, snapshot: Any) -> None:
        # names of parameters are found by their identity, which a hook may have changed
        self._recorder = OperatorRecorder(self._model)
        self._recorder.__enter__()

    def stop(self) -> Any:
        """A function that returns what the iteration's line gets."""
        recorder = self._recorder
        self.remove()
        return lambda found: {OPERATORS: lines(recorder.records())}

    def remove(self) -> None:
        if self._recorder is not None:
            self._recorder.__exit__(None, None, None)
            self._recorder = None


def lines(records: Sequence[Record]) -> List[list]:
    """[phase, path, operator, call, in, out, shapes] of every operator, in order."""
    calls: Counter = Counter()
    found = []
    for record in records:
        site = record.phase, record.path, record.name
        found.append([*site, calls[site], _one(record.inputs, record.arguments),
                      _one(record.outputs), record.shapes])
        calls[site] += 1
    return found


def _one(digests: Sequence[str], arguments: str = '') -> Optional[str]:
    """One digest of several, and of arguments that are no tensors; None for no tensors at all."""
    if not digests:
        return None
    named: Dict[str, int] = {f'{i} {"" if digest else "unwritten"}': int(digest or '0', 16)
                             for i, digest in enumerate(digests)}
    named[arguments] = 0
    return combined_hex(named)
