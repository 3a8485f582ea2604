"""Detectors x virtual ranks x processes x resumes: does the number of processes change a bit?

    python -m dev.virtual_ranks_matrix --out docs/results/virtual_ranks_matrix.json

A run takes two epochs of two iterations (or four iterations), writes a checkpoint after each, and
validates. One process runs all V virtual ranks first, each with weights of its own; every row has
to show the same, with weights that the ranks of a process share. Rows without a resume: N processes
from the beginning. With one: N processes go on with a checkpoint that another number of processes
has written; the points of the resumes alternate. Compared, as bytes, for every iteration and every
virtual rank: the batch and the losses, and after the step gradients, parameters, buffers, optimizer
state and averages; the metrics of validations.

The networks are small, with all parts of the real ones; the statistics of BatchNorm belong to a
rank. The processes are real ones and communicate over gloo.

``--memory sharded`` divides the weights among the ranks instead. ``--out`` continues a file
that stands, row by row; a row that crashed has the error as its difference. ``--fault NAME`` plants
a fault in all runs, of a network that relies on what it breaks; rows on two processes or more have
to show it (not in the file of the docs).
"""
from __future__ import annotations

import argparse
import gc
import os
import tempfile
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any, Callable

import one_thread  # noqa: F401  before torch

# isort: split
import torch
from demo_runs import changed
from virtual_faults import FAULTS
from virtual_runs import run

from dev.matrix_rows import RowFile, lines_differ
from dev.virtual_ranks_detectors import CONFIGS, FOR_FAULTS, ITERATIONS, settings
from mmrepro.config import randomness_of

RANKS, PROCESSES = (2, 4, 8), (1, 2, 3, 4)
KEYS = ('config', 'ranks', 'processes', 'resumed_from', 'memory')


def rows(configs: list[str], ranks: list[int], processes: list[int],
         memory: str = 'shared') -> list[dict[str, Any]]:
    """Return the rows; ``resumed_from``: processes that wrote the checkpoint, 0: no resume."""
    table = []
    for name in configs:
        for count in ranks:
            allowed = [number for number in processes if number <= count]
            table += [dict(zip(KEYS, (name, count, number, 0, memory))) for number in allowed]
            table += [dict(zip(KEYS, (name, count, number, before, memory)))
                      for before, number in zip(allowed, [*allowed[1:], allowed[0]])]
    return table


def point_of(row: dict[str, Any]) -> int:
    """Return the iteration after which a row resumes; 0: none."""
    if not row['resumed_from']:
        return 0
    if row['processes'] % 2:
        return 3  # in the middle of an epoch, and of an accumulation cycle
    return 1 if row['ranks'] == 2 else 2


def difference(expected: list[list[dict]], found: list[list[dict]], point: int) -> str:
    """'' when ``found`` is what ``expected`` has from iteration ``point`` on."""
    for rank, (before, after) in enumerate(zip(expected, found)):
        before = [line for line in before if line['iteration'] >= point]
        if before and 'metrics' in before[0] and before[0] != after[0]:
            del before[0]  # the run that wrote the checkpoint had validated already
        text = lines_differ(rank, before, after)
        if text:
            return text
    return ''


def fill(table: list[dict[str, Any]], data_root: str, folder: Path,
         done: Callable[[dict[str, Any]], None]) -> None:
    """Run the rows in ``table``; ``done(row)`` is called with the outcome added."""
    import mmdet.datasets
    import mmdet.models  # noqa: F401  once, before the processes are forked
    gc.freeze()  # what is imported is never garbage: every process would look it through
    for name, ranks in dict.fromkeys((row['config'], row['ranks']) for row in table):
        with tempfile.TemporaryDirectory(dir=folder) as own:
            _fill_group([row for row in table if (row['config'], row['ranks']) == (name, ranks)],
                        settings(name, ranks, data_root), Path(own), done)


def _fill_group(table: list[dict[str, Any]], cfg: Any, folder: Path,
                done: Callable[[dict[str, Any]], None]) -> None:
    """Run the rows of one config and one number of ranks."""
    ranks = table[0]['ranks']
    expected = run(_keeping(cfg, 'separate'), ranks, 1, folder / 'reference')
    _check_reference(expected, ranks)
    written = set()

    def outcome(row: dict[str, Any]) -> str:
        before, number, point = row['resumed_from'], row['processes'], point_of(row)
        mine = _keeping(cfg, row['memory'])
        if not before:
            found = run(mine, ranks, number, folder / str(number))
            written.add(number)
            return difference(expected, found, 0)
        if before not in written:  # by a row that the file has
            run(mine, ranks, before, folder / str(before))
            written.add(before)
        last = changed(mine, lambda cfg: cfg.default_hooks.checkpoint.update(interval=100))
        return difference(expected, run(
            last, ranks, number, folder / f'{before} to {number}',
            resume=folder / str(before) / f'iter_{point}.pth'), point)

    for row in table:
        start = time.monotonic()
        try:
            different = outcome(row)
        except RuntimeError as error:  # of a run; the other rows go on
            different = str(error).strip().splitlines()[-1]
        done(dict(row, difference=different, resumed_at=point_of(row),
                  seconds=round(time.monotonic() - start, 1)))


def _keeping(cfg: Any, memory: str) -> Any:
    return changed(cfg, lambda cfg: cfg.randomness.update(
        virtual_ranks=dict(randomness_of(cfg).as_dict()['virtual_ranks'], memory=memory)))


def _check_reference(lines: list[list[dict]], ranks: int) -> None:
    """The run that all are compared with trained every rank, on data of its own."""
    assert len(lines) == ranks
    for own in lines:
        assert len([line for line in own if 'data' in line]) == ITERATIONS
        assert any('metrics' in line for line in own)
    assert len({own[0]['data'] for own in lines}) == ranks
    weights = [line['weights'] for line in lines[0] if 'data' in line]
    assert len(set(weights)) > 1, 'no step has changed a weight'


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--out', required=True)
    parser.add_argument('--configs', nargs='+', choices=[*CONFIGS, *FOR_FAULTS])
    parser.add_argument('--ranks', nargs='+', type=int, default=list(RANKS))
    parser.add_argument('--processes', nargs='+', type=int, default=list(PROCESSES))
    parser.add_argument('--memory', choices=['shared', 'sharded'], default='shared')
    parser.add_argument('--fault', choices=list(FAULTS))
    args = parser.parse_args()
    from mmrepro.demo.dataset import write_dataset
    file = RowFile(args.out, KEYS, torch=torch.__version__, iterations=ITERATIONS,
                   **(dict(fault=args.fault) if args.fault else {}))
    configs = args.configs or [*(FOR_FAULTS if args.fault else CONFIGS)]
    table = file.missing(rows(configs, args.ranks, args.processes, args.memory))
    fault = FAULTS[args.fault]() if args.fault else nullcontext()
    with tempfile.TemporaryDirectory() as folder, fault:
        write_dataset(os.path.join(folder, 'data'))
        fill(table, os.path.join(folder, 'data'), Path(folder), file.add)


if __name__ == '__main__':
    main()
