"""The message for a repeated step that differs, and the file that holds the digests."""
from __future__ import annotations

import json
import os
from collections.abc import Sequence
from typing import Any, NoReturn

from mmengine.dist import get_rank

from ..distributed.agreement import agree
from ..errors import StepDiffersError
from ..fingerprint.records import PHASES, Record
from ..fingerprint.schema import FOLDER
from ..util.text import listed
from . import Diagnosis, diagnose
from .observer import FIELDS, PassDigests

FILE = 'step_check.iteration{}.rank{}.json'
PASSES = ('first', 'second', 'first recorded', 'second recorded')
SHOWN = 5  # names of attributes

ATTRIBUTES = (
    'The forward pass changes attributes that reach the loss and that no checkpoint keeps: {}.\n'
    'A resumed run starts without them. Compute the value from the iteration or draw it from a '
    'global generator, keep it in a buffer (register_buffer), or name it: '
    'mmrepro.keep_attributes(Class, "attribute").')
HEAD = ('The step of iteration {} (counted from 0) was repeated from the same state on the same '
        'batch, and its bits differ.')
OFF = 'To train on without this check: randomness.self_checks=dict(steps=0).'
AGAIN = ('A and B are two more passes that were recorded. Where they first differ:\n{}')
NOT_RECORDED = (
    'Operators of sharded weights are not recorded: with randomness.virtual_ranks.memory='
    "'shared', this message names the first operator that differs.")
NOT_AGAIN = (
    'Two more passes, recorded, have the same bits{}. What differs only now and then is a value '
    'that the step keeps outside of the model (in a module, a function, a closure), a race '
    'between threads, memory that is read before it is written, or hardware that computes wrongly '
    '(silent data corruption). Run it again on this machine and on another one; check the memory '
    'and the GPU (nvidia-smi -q -d ECC, dcgmi diag).')


def report(runner: Any, passes: Sequence[PassDigests], records: Sequence[Sequence[Record]],
           attributes: Sequence[str]) -> None:
    """Write the digests of this rank into the work directory and stop all ranks.

    Args:
        passes: the two that were compared, and two that were recorded.
        records: the operators of the latter; empty if they cannot be recorded.
        attributes: those that change the bits when a pass finds them as the first had left them.

    Raises:
        StepDiffersError: always, the same text on all ranks.
    """
    rank, iteration = get_rank(), runner.iter
    diagnosis = diagnose(iteration, rank, *records)
    path = os.path.join(runner.work_dir, FOLDER, FILE.format(iteration, rank))
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with open(path, 'w', encoding='utf-8') as file:
        json.dump(dict(
            kind='step check', iteration=iteration, rank=rank, attributes=list(attributes),
            diagnosis=diagnosis._asdict() if diagnosis else None,
            passes={name: digests._asdict() for name, digests in zip(PASSES, passes)}),
            file, indent=1)
    mine = dict(difference=_difference(*passes[:2]), attributes=list(attributes),
                diagnosis=_diagnosis(diagnosis, passes, any(records)), file=path,
                phase=PHASES.index(diagnosis.phase) if diagnosis else len(PHASES))
    ranks = agree('differing step', mine, lambda ranks: ranks)
    raise StepDiffersError(_text(iteration, ranks))


def report_unexplained(runner: Any, first: PassDigests, second: PassDigests,
                       problem: str) -> NoReturn:
    """Stop the run for a difference that no further pass could explain, and say why.

    Raises:
        StepDiffersError: always.
    """
    raise StepDiffersError('\n'.join([
        HEAD.format(runner.iter), _difference(first, second),
        f'Further passes, which would name the cause, failed: {problem}.', OFF]))


def _difference(first: PassDigests, second: PassDigests) -> str:
    """Return the first loss or gradient that differs, and how many do; '' for none."""
    differing = first.differing(second)
    if not differing:
        return ''
    field, names = next(iter(differing.items()))
    values = [getattr(digests, field).get(names[0]) for digests in (first, second)]
    if field == 'losses' and None not in values:
        values = [f'{float.fromhex(value)!r} ({value})' for value in values]
    counts = listed([f'{len(names)} of {len(getattr(first, field))} {field}'
                     for field, names in differing.items()])
    return (f'first difference: {FIELDS[field].format(names[0])}: {values[0]} and '
            f'{values[1]}\n'
            f'in all: {counts}')


def _diagnosis(diagnosis: Diagnosis | None, passes: Sequence[PassDigests],
               recorded: bool) -> str:
    if diagnosis is not None:
        return AGAIN.format(diagnosis.text())
    if not recorded:
        return NOT_RECORDED
    first, second, third, fourth = passes
    if third.differing(fourth):
        return ('Two more passes, recorded, differ as well, and their operators agree: what '
                "differs was computed outside of torch's operators.")
    agree = [name for name, digests in zip(PASSES, (first, second)) if not digests.differing(third)]
    return NOT_AGAIN.format(f' as the {agree[0]}' if len(agree) == 1 else '')


def _text(iteration: int, ranks: Sequence[dict[str, Any]]) -> str:
    lines = [HEAD.format(iteration)]
    several = len(ranks) > 1
    differing = [number for number, rank in enumerate(ranks) if rank['difference']]
    if several:
        lines.append(f'Ranks that differ: {", ".join(map(str, differing))} of {len(ranks)}. All '
                     'ranks have stopped; what one rank computes reaches the others.')
    for number in differing:
        head = f'rank {number}: ' if several else ''
        lines += [f'{head}{line}' for line in ranks[number]['difference'].splitlines()]
    attributes = list(dict.fromkeys(name for rank in ranks for name in rank['attributes']))
    if attributes:
        lines.append(ATTRIBUTES.format(listed(attributes, SHOWN)))
    # the earliest phase is where it began
    origin = min(differing, key=lambda number: (ranks[number]['phase'], number))
    head = f'Rank {origin}: ' if several else ''
    lines += [f'{head}{ranks[origin]["diagnosis"]}',
              f'Digests: {", ".join(ranks[number]["file"] for number in differing)}',
              OFF]
    return '\n'.join(lines)
