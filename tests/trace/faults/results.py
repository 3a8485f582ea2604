"""The table of outcomes, docs/results/planted_faults.{json,md}: every fault that is searched for
writes its row."""
from __future__ import annotations

import json
import platform
from pathlib import Path

import mmdet
import mmengine
import torch

HEAD = '''# Planted faults, and what `mmrepro localise` says of them

Written by the tests (`MMREPRO_RESULTS=docs/results`, the whole or any part of
`tests/trace/test_faults.py`): a row is written when place, kind and cause are those that were
planted. {count} faults, all named. {versions}.

| fault | run | iteration | phase | path | operator, transform | cause named |
|---|---|---|---|---|---|---|
'''


def add(folder, name, fault, finding):
    """Write or replace the row of one fault; the table is made from all rows."""
    folder = Path(folder)
    path = folder / 'planted_faults.json'
    rows = json.loads(path.read_text()) if path.exists() else {}
    ranks = f', {fault.ranks} ranks' if fault.ranks > 1 else ''
    rows[name] = dict(
        run=(fault.model or 'tiny network') + ranks, sides=fault.sides, rank=finding.rank,
        iteration=finding.iteration, phase=finding.phase, path=finding.path,
        operator=finding.operator, kind=finding.kind, cause=finding.cause, mover=finding.mover,
        versions=f'torch {torch.__version__}, mmengine {mmengine.__version__}, mmdet '
                 f'{mmdet.__version__}, Python {platform.python_version()}')
    rows = dict(sorted(rows.items()))
    path.write_text(json.dumps(rows, indent=1) + '\n')
    versions = '; '.join(sorted({row['versions'] for row in rows.values()}))
    (folder / 'planted_faults.md').write_text(
        HEAD.format(versions=versions, count=len(rows)) + ''.join(map(_line, rows, rows.values())))


def _line(name, row):
    mover = f' ({row["mover"]})' if row['mover'] else ''
    cells = [name.replace('_', ' '), row['run'], row['iteration'], row['phase'],
             f'`{row["path"] or "(the model)"}`', f'`{row["operator"]}`', row['cause'] + mover]
    return f'| {" | ".join(map(str, cells))} |\n'
