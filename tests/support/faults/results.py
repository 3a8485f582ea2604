"""The tables of outcomes, docs/results/planted_faults.{json,md}: every fault that is searched for
writes its row."""
import json
from pathlib import Path

from faults.real import FAULTS, versions

HEAD = '''# Planted faults, and what `mmrepro localise` reports

Written by the tests (`MMREPRO_RESULTS=docs/results tools/test.sh --nightly`, or any part of
`tests/localise/test_planted_faults.py`): a row is written when call site, kind and cause are as
planted. {count} faults, all named. {versions}.

| fault | run | iteration | phase | path | operator, transform | cause named |
|---|---|---|---|---|---|---|
'''

REAL = '''
## In real detectors, through the command line

Each row is a file that a user could have written (`tests/support/faults/detectors`), in
`custom_imports` of a demo config (Faster R-CNN with ResNet-18 and images of 160 pixels, YOLOX-s as
it is), found by the command in processes of its own. Nothing differs between the runs but what the
command varies. Written by
`MMREPRO_RESULTS=docs/results pytest -m nightly tests/localise/test_planted_faults.py`.
{right} of {count} right; {waiting} more are planted and have not been run for this table.
{versions}.

| fault | model | command | iteration | phase | path | operator | line | cause named | right |
|---|---|---|---|---|---|---|---|---|---|
'''


def add(folder, name, fault, found):
    ranks = f', {fault.ranks} ranks' if fault.ranks > 1 else ''
    write(folder, name, dict(
        run=(fault.model or 'tiny network') + ranks, sides=fault.runs, rank=found.rank,
        iteration=found.iteration, phase=found.phase, path=found.path,
        operator=found.operator, kind=found.kind, cause=found.cause, why=found.sentence,
        mover=found.mover,
        versions=versions()))


def write(folder, name, row):
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / 'planted_faults.json'
    rows = json.loads(path.read_text()) if path.exists() else {}
    rows = dict(sorted({**rows, name: row}.items()))
    path.write_text(json.dumps(rows, indent=1) + '\n')
    text = ''
    for head, line, chosen in ((HEAD, _line, False), (REAL, _real_line, True)):
        some = {key: one for key, one in rows.items() if ('command' in one) == chosen}
        if some:
            text += head.format(
                count=len(some), waiting=len(set(FAULTS) - set(some)),
                right=sum(one.get('right', True) for one in some.values()),
                versions='; '.join(sorted({one['versions'] for one in some.values()})))
            text += ''.join(map(line, some, some.values()))
    (folder / 'planted_faults.md').write_text(text)


def _line(name, row):
    mover = f' ({row["mover"]})' if row['mover'] else ''
    cells = [name.replace('_', ' '), row['run'], row['iteration'], row['phase'],
             f'`{row["path"] or "(the model)"}`', f'`{row["operator"]}`', row['cause'] + mover]
    return f'| {" | ".join(map(str, cells))} |\n'


def _real_line(name, row):
    found = [row['iteration'], row['phase'], f'`{row["path"] or "(the model)"}`',
             f'`{row["operator"]}`', f'`{row["line"]}`', row['cause'] + (
                 f' ({row["mover"]})' if row['mover'] else '')] if row['found'] else [
        '', '', '', '', '', 'none: same bits']
    cells = [name.replace('_', ' '), row['model'], f'`{row["command"]}`', *found,
             row.get('note') or ('yes' if row['right'] else '**no**')]
    return f'| {" | ".join(map(str, cells))} |\n'
