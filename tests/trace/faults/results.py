"""The table of outcomes, as docs/results/planted_faults.{json,md}; a nightly run writes it."""
from __future__ import annotations

import json
import platform
from pathlib import Path

import mmdet
import mmengine
import torch

HEAD = '''# Planted faults, and what `mmrepro localise` says of them

Written by the nightly tests (`tests/trace/test_faults.py`, with
`MMREPRO_RESULTS=docs/results`), which fail when a place, a kind or a cause is not the one that
was planted. {versions}.

| fault | run | iteration | phase | path | operator, transform | cause named |
|---|---|---|---|---|---|---|
'''


def write(folder, outcomes, faults):
    """Both files, of ``name -> Outcome``."""
    versions = f'torch {torch.__version__}, mmengine {mmengine.__version__}, mmdet ' \
               f'{mmdet.__version__}, Python {platform.python_version()}'
    rows = []
    for name, fault in faults.items():
        found = outcomes[name].finding
        rows.append(dict(
            fault=name, run=fault.model or ('tiny network' if fault.ranks == 1 else
                                            f'tiny network, {fault.ranks} ranks'),
            in_sides=fault.sides, iteration=found.iteration, rank=found.rank, phase=found.phase,
            path=found.path, operator=found.operator, kind=found.kind, cause=found.cause,
            mover=found.mover))
    folder = Path(folder)
    text = json.dumps(dict(versions=versions, faults=rows), indent=1)
    (folder / 'planted_faults.json').write_text(text + '\n')
    lines = [' | '.join(['', row['fault'].replace('_', ' '), row['run'], str(row['iteration']),
                         row['phase'], f'`{row["path"] or "(the model)"}`', f'`{row["operator"]}`',
                         row['cause'] + (f' ({row["mover"]})' if row['mover'] else ''), '']).strip()
             for row in rows]
    (folder / 'planted_faults.md').write_text(
        HEAD.format(versions=versions) + '\n'.join(lines) + '\n')
