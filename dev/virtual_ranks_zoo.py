"""Every family of MMDetection's zoo on virtual ranks: does the number of processes change a bit?

    python -m dev.virtual_ranks_zoo --out docs/results/virtual_ranks_zoo.json
    python -m dev.virtual_ranks_zoo --ranks 1 --out docs/results/zoo_trained.json
    python -m dev.virtual_ranks_zoo --ranks 4 --out docs/results/sharded_zoo.json

For each family, three ranks take four iterations, with a validation and a checkpoint after the
second. One process runs all ranks first. Then two processes from the beginning, two processes that
go on with the checkpoint of one, and one that goes on with the checkpoint of two. Compared as in
dev/virtual_ranks_matrix.py, whose digests are used: for every iteration and rank, as bytes, the
batch and the losses, and after the step gradients, parameters, buffers, optimizer state and
averages; the metrics of validations.

With ``--ranks 1`` there are no virtual ranks: a run, and one that goes on with its checkpoint.

With ``--ranks 4`` weights are sharded, on one to four processes. What they are compared with has
one process whose ranks share weights. A run that goes on from "1 process" has the checkpoint of
that one, and one that goes on with one process shares weights again.

All settings of ``randomness`` are the defaults, with ``deterministic=True``: steps and samples are
repeated, and ranks share weights where they can. A family is trained with the first width that
MMDetection itself can train, without mmrepro's runner; where it can with none, the row says why.

``--out`` continues a file that stands; ``--again`` runs the rows again that show a difference.
"""
from __future__ import annotations

import argparse
import copy
import gc
import json
import os
import re
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Callable

import one_thread  # noqa: F401  before torch

# isort: split
import torch
from demo_runs import changed
from harness import Child
from virtual_runs import run

from dev.matrix_rows import RowFile
from dev.virtual_ranks_matrix import difference
from dev.zoo import training as zoo
from dev.zoo.families import FAMILIES, PACKAGES, Member
from dev.zoo.run_facts import facts_of
from dev.zoo.step import one_rank
from dev.zoo.training import RESUMED_AT, VAL_IMAGES, WIDTHS, training
from mmrepro.config import RandomnessConfig
from mmrepro.objects.walks import dicts as nodes

RANKS = 3
# processes, and those of the run that wrote the checkpoint; 0: none
ROWS = {  # by number of ranks
    RANKS: ((1, 0), (2, 0), (2, 1), (1, 2)), 1: ((1, 0), (1, 1)),
    4: ((1, 0), (2, 0), (3, 0), (4, 0), (3, 1), (1, 2), (2, 4), (4, 3)),
}
SHARDED = 4  # ranks
KEYS = ('family', 'config', 'processes', 'resumed_from')
ZOO = Path(__file__).resolve().parents[1] / 'docs' / 'results' / 'zoo_cpu.json'
FAMILY_LIMIT = 3600  # seconds for a family, on a machine that may be busy
NOTHING = 'tracks, or classifies images: it trains no detector'
ERROR = re.compile(r'[\w.]*(Error|Exception|Mismatch|Killed)\b')
LONGEST = 85  # characters of an error: a cell of a table

# one that has the parts in question: a family's first config otherwise
CHOSEN = {
    'rtmdet': 'rtmdet_tiny', 'htc': 'htc-without-semantic', 'tood': 'tood_r50_fpn_1x',
    'yolox': 'yolox_nano', 'solo': 'solo_r18', 'detr': 'detr_r18',
    'cascade_rpn': 'cascade-rpn_faster', 'gcnet': 'mask-rcnn_r50-syncbn',
}

# not in the sweep's list: the base of QDTrack has no data, SSDLite takes small images as well
INSTEAD = {
    'qdtrack': Member('qdtrack/qdtrack_faster-rcnn_r50_fpn_8xb2-4e_mot17halftrain_'
                      'test-mot17halfval.py', 'video'),
    'ssd': Member('ssd/ssdlite_mobilenetv2-scratch_8xb24-600e_coco.py', size=96),
}


def chosen(families: Sequence[str] = ()) -> list[Member]:
    """Return a config per family: that of CHOSEN, or the first that the sweep could train.

    Raises:
        ValueError: naming a family that the zoo does not have.
    """
    outcomes = {row['config']: row['outcome'] for row in json.loads(ZOO.read_text())['rows']}
    found: dict[str, list[Member]] = {}
    for member in FAMILIES:
        found.setdefault(member.family, []).append(member)
    unknown = [name for name in families if name not in found]
    if unknown:
        raise ValueError(f'the zoo has no {unknown[0]!r}; allowed: {", ".join(found)}')

    def wanted(member: Member) -> tuple[bool, bool]:
        name = os.path.basename(member.config)
        return (not name.startswith(CHOSEN.get(member.family, '')),
                outcomes.get(member.config) != 'ok')

    return [INSTEAD.get(name) or min(found[name], key=wanted) for name in families or found]


# ------------------------------------------------------------- what MMDetection itself can train

def _stock(cfg: Any) -> None:
    """Train an iteration and validate, with MMEngine's runner."""
    import mmrepro
    from mmrepro import patches
    mmrepro.deactivate()
    patches.apply()  # SSD has to be able to validate
    from mmengine.runner import Runner
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    cfg.pop('custom_imports')
    cfg.randomness = dict(seed=42)
    if 'max_iters' in cfg.train_cfg:
        cfg.train_cfg.max_iters = 1
    else:
        cfg.train_cfg.max_epochs = 1
        dataset = cfg.train_dataloader.dataset
        dataset.get('dataset', dataset)['indices'] = cfg.train_dataloader.batch_size
    cfg.default_hooks.checkpoint = None
    with one_rank(cfg):
        Runner.from_cfg(cfg).train()


def fitting(member: Member, data_root: str, folder: Path,
            ranks: int = RANKS) -> tuple[Any | None, str]:
    """Return the config in the first width that MMDetection can train, and the width.

    Returns:
        tuple: None and the error where it can train none.
    """
    problem = ''
    for width in WIDTHS if member.data else ():
        try:
            cfg = training(member, data_root, ranks, width)
            if ranks == 1 and any(node.get('type') == 'MMSyncBN' for node in nodes(cfg.model)):
                return None, 'MMSyncBN needs several processes'
            cfg.work_dir = str(folder / 'stock')
            Child(_stock, copy.deepcopy(cfg)).result()
            return cfg, width
        except Exception as error:  # of whatever a model cannot stand
            problem = _message(error)
    return None, problem or NOTHING


def _message(error: BaseException) -> str:
    """Return the line of a traceback that names the error; what follows may be long."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    named = [line for line in lines if ERROR.match(line)]
    chain = ''.join(traceback.format_exception(None, error, None)).splitlines()
    missing = [line for line in chain if 'No module named' in line]  # the cause of those behind it
    return (missing or named or lines or [type(error).__name__])[-1][:LONGEST]


# --------------------------------------------------------------------------------------- the rows

def family_rows(member: Member, data_root: str, folder: Path, ranks: int = RANKS,
                table: Sequence[tuple[int, int]] = ()) -> Iterator[dict[str, Any]]:
    """Run a family; yields its rows with their outcomes."""
    same = dict(family=member.family, config=member.config)
    cfg, width = fitting(member, data_root, folder, ranks)
    if cfg is None:
        yield dict(same, processes=0, resumed_from=0, difference='', cannot=_reason(member, width))
        return
    yield from compared(cfg, folder, dict(same, width=width), table or ROWS[ranks], ranks)


def compared(cfg: Any, folder: Path, same: dict[str, Any],
             table: Sequence[tuple[int, int]] = ROWS[RANKS],
             ranks: int = RANKS) -> Iterator[dict[str, Any]]:
    """The runs in ``table``, each compared with one process that begins; ``same``: in all rows."""
    cfg = changed(cfg, lambda cfg: cfg.update(custom_hooks=[
        *(cfg.get('custom_hooks') or ()), dict(type='RunFactsHook')]))
    expected: list[list[dict]] = []
    if ranks == SHARDED:
        expected = _reference(run(cfg, ranks, 1, folder / '0 to 1'), ranks)
    for processes, before in table:
        start = time.monotonic()
        arguments = _arguments(cfg, folder, ranks, processes, before)
        try:
            found = run(*arguments)
            expected = expected or _reference(found, ranks)
            text = difference(expected, found, RESUMED_AT if before else 0)
            facts = _facts(arguments[3])
        except Exception as error:  # of a run; the other rows go on
            text, facts = _message(error), {}
            if os.environ.get('TRACE'):
                print(error)
        yield dict(same, processes=processes, resumed_from=before, difference=text,
                   seconds=round(time.monotonic() - start, 1), **facts)
        if not expected:
            return


def _arguments(cfg: Any, folder: Path, ranks: int, processes: int, before: int) -> tuple:
    work_dir = folder / f'{before} to {processes}'
    virtual = ranks if ranks > 1 else None
    if ranks == SHARDED and not (before and processes == 1):
        cfg = changed(cfg, lambda cfg: cfg.randomness.update(
            virtual_ranks=dict(ranks=ranks, memory='sharded')))
        virtual = None
        work_dir = folder / f'{before} to {processes}, sharded' if processes == 1 else work_dir
    if not before:
        return cfg, virtual, processes, work_dir
    last = changed(cfg, lambda cfg: cfg.default_hooks.checkpoint.update(interval=100))
    return last, virtual, processes, work_dir, folder / f'0 to {before}' / f'iter_{RESUMED_AT}.pth'


def _reference(lines: list[list[dict]], ranks: int) -> list[list[dict]]:
    """The run that the others are compared with: it trained every rank, on data of its own."""
    assert len(lines) == ranks
    for own in lines:
        assert len([line for line in own if 'data' in line]) == zoo.ITERATIONS
    assert len({own[0]['data'] for own in lines}) == ranks, 'ranks had the same batch'
    weights = {line['weights'] for line in lines[0] if 'data' in line}
    assert len(weights) > 1, 'no step has changed a weight'
    return lines


def _facts(work_dir: Path) -> dict[str, Any]:
    facts = facts_of(work_dir)
    usual = RandomnessConfig().self_checks
    assert facts.pop('checks') == [(usual.steps, usual.samples)], 'checks are off'
    assert facts['steps'], 'no step was repeated'
    return facts


def _reason(member: Member, error: str) -> str:
    """Why a family is not trained: a package that is missing, or MMDetection's error."""
    if not member.data:
        return error
    missing = [name for name in member.packages if not find_spec(PACKAGES[name].module)]
    return f'needs {", ".join(missing)}' if missing else f'MMDetection: {error}'


def _whole_family(member: Member, data_root: str, folder: str, ranks: int) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory(dir=folder) as own:
        return list(family_rows(member, data_root, Path(own), ranks))


def sweep(members: Sequence[Member], data_root: str, folder: str, jobs: int,
          done: Callable[[dict[str, Any]], None], ranks: int = RANKS) -> None:
    """Run families, ``jobs`` at a time, each in a process of its own; ``done`` gets the rows."""
    import mmdet.datasets
    import mmdet.models  # noqa: F401  once, before the processes are forked
    gc.freeze()  # what is imported is never garbage: every process would look it through
    running: list[Child] = []

    def finish() -> None:
        for row in running.pop(0).result(FAMILY_LIMIT):
            done(row)

    for member in members:
        if len(running) >= jobs:
            finish()
        running.append(Child(_whole_family, member, data_root, folder, ranks))
    while running:
        finish()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--out', required=True)
    parser.add_argument('--ranks', type=int, choices=sorted(ROWS), default=RANKS)
    parser.add_argument('--families', nargs='+', default=[], help='all without it')
    parser.add_argument('--jobs', type=int, default=1, help='families at the same time')
    parser.add_argument('--again', action='store_true', help='also rows that show a difference')
    args = parser.parse_args()
    from mmrepro.demo.dataset import write_dataset
    file = RowFile(args.out, KEYS, torch=torch.__version__, ranks=args.ranks,
                   iterations=zoo.ITERATIONS)
    members = chosen(args.families)
    if args.again:
        red = {row['family'] for row in file.rows if row['difference']}
        file.rows[:] = [row for row in file.rows if row['family'] not in red]
    counts = Counter(row['family'] for row in file.rows if 'cannot' not in row)
    file.rows[:] = [row for row in file.rows  # a family that was interrupted begins again
                    if 'cannot' in row or counts[row['family']] == len(ROWS[args.ranks])
                    or row['difference']]
    finished = {row['family'] for row in file.rows}
    with tempfile.TemporaryDirectory() as folder:
        data_root = os.path.join(folder, 'data')
        write_dataset(data_root, num_val=VAL_IMAGES)
        zoo.write_extras(data_root)
        sweep([one for one in members if one.family not in finished], data_root, folder,
              args.jobs, file.add, args.ranks)


if __name__ == '__main__':
    main()
