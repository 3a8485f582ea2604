"""The records of an iteration, and the files that hold them."""
from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, get_args

from ..errors import FingerprintError
from .reader import lines_of

# path of a record of the data pipeline: epoch and position, samples mixed in, number of a transform
SAMPLE = re.compile(r'sample (\d+)\.(-?\d+)/(?:partner .*/)?(begin|end|\d+)')
BEFORE_ITERATION, AFTER_ITERATION = 'state before the iteration', 'state after the iteration'
BEFORE_HOOK, AFTER_HOOK = 'state before the hook', 'state after the hook'
# names of states -> their moment in the iteration; {}: the hook
STATES = {BEFORE_ITERATION: 'before its first hook', AFTER_ITERATION: 'after its last hook',
          BEFORE_HOOK: 'before {}', AFTER_HOOK: 'in {}'}
ALWAYS = ('phase', 'path', 'name', 'stack')  # written even when empty
SEPARATOR = '; '  # between the values of Record.arguments
# names of records that explain differences and are not compared
ATTRIBUTES, DATASET, SAMPLER = 'attributes', 'dataset', 'sampler'
UNINITIALIZED = 'memory that nothing has written'  # label of an input

# prefixes of names in Record.own that are not generators
ATTRIBUTE, GLOBAL = 'self.', 'global '
# files between the model and the operator, left out of messages
LIBRARY = ('/torch/nn/modules/module.py', '/torch/nn/functional.py', '/torch/autograd/',
           '/torch/utils/_contextlib.py', '/torch/optim/optimizer.py', '/runpy.py', '<frozen')

# in the order of an iteration
Phase = Literal['start', 'data', 'forward', 'loss', 'backward', 'optimizer', 'hook']
PHASES: tuple[Phase, ...] = get_args(Phase)
Frame = tuple[str, int, str]  # file, line and function of a call


class Record(NamedTuple):
    """An operator, transform, hook or state of an iteration."""
    phase: Phase
    path: str  # of the module, parameter, transform or hook
    name: str  # of the operator, transform or event
    shapes: str = ''  # of tensors given and returned, with their types
    arguments: str = ''  # all arguments that are not tensors
    inputs: tuple[Any, ...] = ()  # digests of the tensors given; '' for uninitialized memory
    outputs: tuple[Any, ...] = ()  # digests of tensors returned or changed; '' for views
    labels: tuple[str, ...] = ()  # names of inputs that are parameters or buffers, else ''
    generators: tuple[str, ...] = ()  # states of the global generators before, as short hex
    stack: tuple[Frame, ...] = ()  # innermost first
    drew: bool = False  # whether the operator draws random numbers
    calls: tuple[str, ...] = ()  # reads of clock, entropy, ... since the last record
    own: tuple[str, ...] = ()  # generators and plain values of a transform, as name=state

    @property
    def is_state(self) -> bool:
        """Whether this is a state at a boundary: names in ``labels``, digests in ``outputs``."""
        return self.name in STATES

    @property
    def sample(self) -> tuple[int, int] | None:
        """Epoch and position of the sample that is loaded; None outside of the data pipeline."""
        match = SAMPLE.fullmatch(self.path)
        return (int(match[1]), int(match[2])) if match else None

    @property
    def moment(self) -> str:
        """'begin' or 'end' of the sample, or the number of the transform; '' without a sample."""
        match = SAMPLE.fullmatch(self.path)
        return match[3] if match else ''

    @property
    def site(self) -> tuple[str, str, str]:
        """Phase, path and name: what runs where."""
        return self.phase, self.path, self.name

    @property
    def key(self) -> tuple[str, ...]:
        """Key that the same step has in both runs."""
        return *self.site, self.shapes


def write_records(path: str, records: Sequence[Record]) -> None:
    """Write one JSON object per line; a stack has a line before the first record with it."""
    known: dict[tuple[Any, ...], int] = {}
    with open(path, 'w', encoding='utf-8') as file:
        for record in records:
            if record.stack not in known:
                known[record.stack] = len(known)
                file.write(json.dumps({'stack': record.stack}) + '\n')
            file.write(_line(record, known[record.stack]))


def append_record(path: str, record: Record) -> None:
    """Append one record, with its stack, so that a killed process leaves whole lines."""
    with open(path, 'a', encoding='utf-8') as file:
        file.write(_line(record))


def _line(record: Record, stack: Any = None) -> str:
    fields = dict(record._asdict(), stack=record.stack if stack is None else stack)
    return json.dumps({key: value for key, value in fields.items()
                       if value or key in ALWAYS}) + '\n'


def read_records(path: str) -> list[Record]:
    """Read a file of :func:`write_records` or :func:`append_record`."""
    stacks: list[tuple[Any, ...]] = []
    records = []
    for number, line in enumerate(filter(None, lines_of(path)), 1):
        try:
            fields: dict[str, Any] = json.loads(line)
            stack = fields.pop('stack')
            if not fields:
                stacks.append(tuple(map(tuple, stack)))
                continue
            stack = stacks[stack] if isinstance(stack, int) else tuple(map(tuple, stack))
            values: dict[str, Any] = {key: tuple(value) if isinstance(value, list) else value
                                      for key, value in fields.items()}
            records.append(Record(**values, stack=stack))
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
            raise FingerprintError(f'{path}, line {number}: not a record of mmrepro') from error
    return records


def useful_calls(stack: Sequence[Frame]) -> list[Frame]:
    """Return the innermost calls outside of the machinery of torch."""
    calls = [call for call in stack if not any(part in call[0] for part in LIBRARY)]
    return calls or list(stack)
