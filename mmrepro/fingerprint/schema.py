"""The fingerprint files of a run: their names, the kinds of their lines, the meaning of the keys.

A run writes ``WORK_DIR/mmrepro/fingerprints.rankN.jsonl``, one JSON object per line: a ``start``
line for each start of the training, a ``step`` line for each iteration, a ``val`` line for each
validation, and an ``end`` line when the training came to its end. Losses, learning rates, norms and
metrics are hexadecimal floats, which are exact; digests are 16 hexadecimal digits.
"""
from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from ..util.files import SCALAR, Rule, mismatch, or_none
from ..util.text import encoded

FOLDER = 'mmrepro'  # within the work directory
FORMAT = 1
# amounts of detail; the command line names them before torch may be imported
LEVELS = ('step', 'parameter', 'module', 'operator')
MANIFEST = re.compile(r'manifest(?:\.(\d+))?\.json')
FINGERPRINTS = re.compile(r'fingerprints\.rank(\d+)\.jsonl')

START, STEP, VAL, END = 'start', 'step', 'val', 'end'  # kinds of lines

# Fields of a step by which runs are compared, and what computes them. The order is causal: a
# field is computed from fields above it, so the first that differs is the nearest to the cause.
# Buffers (running statistics) are updated in the forward pass and come before what the backward
# pass computes. The learning rate is known early, but only the optimizer step reads it: above the
# losses it would hide what made them differ. The optimizer updates its state, then the parameters,
# of which hooks update averages.
FIELDS: dict[str, str] = {
    'epoch': 'the epoch counter',
    'batch.positions': 'the order of samples',
    'batch.indices': 'which samples are in the batch',
    'batch.data': 'what is in the batch: reading, augmentation, collation',
    'losses': 'the forward pass: model, batch or weights',
    'buffers': 'running statistics, counters',
    'gradients': 'the backward pass, the sum over ranks, or weights that something changed in '
                 'between',
    'lr': 'the schedule or the optimizer',
    'optimizer': 'the state of the optimizer',
    'parameters': 'the optimizer step',
    'averages': 'the averaged weights (EMAHook)',
}
# digests of the model, the optimizer and averages after the step, in the order of a line
STATES = ('gradients', 'parameters', 'buffers', 'optimizer', 'averages')
BY_NAME = 'by_name'  # {state: {name: digest}}, above level 'step'
# numbers of samples and steps that were repeated with the same bits; in an end line and in the
# manifest, not compared
SELF_CHECKS = 'self_checks'
NORMS = 'norms'  # {parameter: L2 norm}, at level 'parameter'

# Calls in the order in which they ran, at levels 'module' and 'operator': what an entry consists of
MODULES, OPERATORS = 'modules', 'operators'
STREAMS: dict[str, dict[str, type]] = {
    OPERATORS: dict(phase=str, path=str, operator=str, number=int, input=object, output=object,
                    shapes=str),
    MODULES: dict(path=str, phase=str, number=int, input=object, output=object),
}


class StreamCall(NamedTuple):
    """An entry of a stream."""
    path: str  # of the module
    phase: str  # forward, loss, backward, optimizer, hook or data
    number: int  # how many such calls came before it in the iteration
    input: Any  # digest; None without tensors
    output: Any
    operator: str = ''  # '' in the stream of modules
    shapes: str = ''  # of the operator's tensors

    @property
    def identity(self) -> tuple[str, str, str, int]:
        """Key that the calls of two runs must share to be compared."""
        return self.path, self.phase, self.operator, self.number

    def text(self) -> str:
        names = ((self.phase, self.path, self.operator) if self.operator else
                 (self.path, self.phase))
        return f'{" ".join(filter(None, names))} (call {self.number})'


def number(value: Any) -> float:
    """Return a float from its exact hex form, or from a number in a log.

    >>> number('0x1.8p+0'), number(2)
    (1.5, 2.0)
    """
    if isinstance(value, str):
        return float.fromhex(value)
    return math.nan if value is None else float(value)


def is_number(value: Any) -> bool:
    try:
        return isinstance(number(value), float)
    except (TypeError, ValueError, OverflowError):
        return False


def _calls(stream: str) -> Rule:
    """Return the shape of a stream; a step may have thousands of entries."""
    kinds = STREAMS[stream]
    return Rule(lambda entries: isinstance(entries, list) and all(
        isinstance(entry, list) and len(entry) == len(kinds)
        and all(map(isinstance, entry, kinds.values())) for entry in entries),
        f'a list of [{", ".join(kinds)}]')


NUMBERS = {str: Rule(is_number, 'a number, or text such as 0x1.8p+0')}
# kind of a line: what readers rely on, see :mod:`mmrepro.util.files`
SHAPES: dict[str, dict[str, Any]] = {
    START: {'format': object, 'level': str, 'rank': int, 'world_size': int, 'iteration': int},
    STEP: {'iteration': int, 'losses?': NUMBERS, 'lr?': dict, f'{NORMS}?': NUMBERS,
           f'{BY_NAME}?': {str: {str: SCALAR}}, 'batch?': {
               'data?': SCALAR, 'indices?': or_none(list), 'positions?': Rule(
                   lambda value: value is None or mismatch(value, [int]) is None, 'a list of int')},
           **{f'{field}?': SCALAR for field in ('epoch', *STATES)},
           **{f'{stream}?': _calls(stream) for stream in STREAMS}},
    VAL: {'iteration': int, 'metrics': NUMBERS},
    END: {'iteration': int},
}
FACTS = {'world_size?': int, str: SCALAR}  # see :func:`mmrepro.facts.collect.collect_facts`
MANIFEST_SHAPE = {'config': {'text': str}, 'facts': FACTS, 'code?': {str: dict},
                  'weights?': {str: dict}, 'data?': {'annotations?': {str: dict}},
                  'sources?': {str: dict.fromkeys(('module', 'file', 'sha256'), str)},
                  'variables?': {str: {'value': or_none(str), 'read': str}}}
# of a manifest, what a repetition of the run needs
REPEATED = {'processes': Rule(lambda value: isinstance(value, int) and value > 0, '1 or more'),
            'environment': {str: str}, 'cwd': str, 'resumed_from': or_none(str)}


def call_of(stream: str, entry: Sequence[Any]) -> StreamCall:
    return StreamCall(**dict(zip(STREAMS[stream], entry)))


def value_of(record: Mapping[str, Any], field: str) -> Any:
    """Return the value of a field such as ``batch.data``; None where the record has none."""
    value: Any = record
    for key in field.split('.'):
        value = value.get(key) if isinstance(value, Mapping) else None
    return value


def meaning(field: str) -> str:
    """Return in words what computes a field or a stream."""
    return FIELDS.get(field, f'the {field} that ran' if field in STREAMS else field)


def fingerprint_name(rank: int) -> str:
    return f'fingerprints.rank{rank}.jsonl'


class Writer:
    """Writes one JSON object per line, unbuffered.

    A torn line of an earlier process is ended first, so that only that line is damaged.
    """

    def __init__(self, path: str) -> None:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        self._file = open(path, 'ab+', buffering=0)
        if self._file.tell():
            self._file.seek(-1, os.SEEK_END)
            if self._file.read(1) != b'\n':
                self._file.write(b'\n')

    def write(self, record: dict[str, Any]) -> None:
        line = json.dumps(record, separators=(',', ':'), ensure_ascii=False, allow_nan=False)
        self._file.write(encoded(line) + b'\n')

    def close(self) -> None:
        self._file.close()
