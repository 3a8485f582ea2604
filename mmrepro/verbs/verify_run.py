"""Let a second process repeat and resume a run that has ended, or that is still going."""
from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from ..checkpoint.completeness import lacks
from ..checkpoint.files import load
from ..errors import DIFFERENT, DONE, NOTHING_TO_COMPARE, CheckpointError, RunError
from ..facts.own_code import edited
from ..fingerprint.schema import FOLDER
from ..report.report import Report
from ..report.table import Table
from ..runs.config_files import read_config
from ..selfcheck import witness_verdict
from ..selfcheck.recipe import FILE, Recipe, Registered
from ..selfcheck.witness import REPEATED_ITERATIONS, RESUMED_ITERATIONS
from ..selfcheck.witness_process import Start, WitnessProcess
from ..util.files import or_none, read_json
from ..util.text import listed

POLL = 0.2  # seconds between two looks at the witness
SHAPE = {'runner': str, 'registered': [[str]], 'path': [str], 'folder': str,
         'script': or_none(str), 'arguments': [str], 'config': str, 'not_rebuilt': str,
         'hooks': [str], 'names': [str], 'first': int, 'code': dict}
SAME = 'SAME BITS: '


class _Try(NamedTuple):
    """Something that a witness is to repeat."""
    title: str
    start: Start | None
    why_not: str = ''


def verify_run(work_dir: str, say: Callable[[str], None] = lambda text: None) -> Report:
    """Repeat the first iterations of a run, resume it from its checkpoints, and compare the bits.

    Nothing in ``work_dir`` is changed.

    Args:
        work_dir: of a run with ``deterministic=True``.
        say: called with lines about the progress.

    Returns:
        A report whose exit code is 0 (same bits), 1 (different) or 3 (nothing was compared).

    Raises:
        RunError: the folder has no run, or its run cannot be built again; says why.
    """
    folder = os.path.join(work_dir, FOLDER)
    path = os.path.join(folder, FILE)
    if not os.path.exists(path):
        raise RunError(f'{work_dir}: has no file {FOLDER}/{FILE}; a run with randomness.'
                       'deterministic=True writes it when its training begins')
    noted = read_json(path, RunError, SHAPE)
    if noted['not_rebuilt']:
        raise RunError(f'{work_dir}: its run cannot be built again: {noted["not_rebuilt"]}')
    lines = witness_verdict.noted_lines(folder)
    steps = set(lines[0].steps) if 0 in lines else set()
    tries = [*_repetition(noted, steps), *_resumes(work_dir, steps)]
    cfg = read_config(os.path.join(work_dir, noted['config']))
    recipe = Recipe(
        noted['runner'], dict(cfg=cfg), [Registered(*entry) for entry in noted['registered']],
        noted['path'], noted['folder'], dict(os.environ), noted['script'], noted['arguments'],
        names=noted['names'])
    metrics = witness_verdict.metrics_of(lines)
    starts = [one.start._replace(metrics=metrics) for one in tries if one.start is not None]
    notes = []
    if noted['hooks']:
        notes.append('hooks that code has registered are left out: '
                     f'{listed(noted["hooks"])}')
    outcomes = _run(recipe, starts, cfg, work_dir, noted['code'], say) if starts else {}
    return _report(work_dir, tries, outcomes, notes)


def _repetition(noted: Any, steps: set[int]) -> list[_Try]:
    title = 'repeated from the seed, with another number of workers'
    if noted['first'] != 0:
        return [_Try(title, None, 'this run was resumed itself')]
    until = next((number for number in range(REPEATED_ITERATIONS) if number not in steps),
                 REPEATED_ITERATIONS)
    if until == 0:
        return [_Try(title, None, 'its first iterations were not noted')]
    return [_Try(title, Start('repeated', 0, until, None, other_workers=True))]


def _resumes(work_dir: str, steps: set[int]) -> list[_Try]:
    """Return the checkpoints in a work directory, in the order of their iterations."""
    found = []
    for name in os.listdir(work_dir):
        if not name.endswith('.pth') or name.startswith('.'):
            continue
        path = os.path.join(work_dir, name)
        title = f'resumed from {name}'
        try:
            content = load(path, mapped=True)
            iteration = content['meta']['iter']
        except (CheckpointError, KeyError, TypeError) as error:
            found.append((0, _Try(title, None, f'it cannot be read: {error}')))
            continue
        problem = lacks(content)
        behind = [step for step in range(iteration, iteration + RESUMED_ITERATIONS)
                  if step in steps]
        if problem is not None:
            found.append((iteration, _Try(title, None, problem)))
        elif not behind:
            found.append((iteration, _Try(title, None, 'no iteration behind it was noted')))
        else:
            found.append((iteration, _Try(title, Start(
                f'resumed{len(found)}', iteration, behind[-1] + 1, os.path.abspath(path)))))
    return [one for _, one in sorted(found, key=lambda pair: pair[0])]


def _run(recipe: Recipe, starts: list[Start], cfg: Any, work_dir: str, code: dict[str, str],
         say: Callable[[str], None]) -> dict[str, str]:
    """Return what became of each start: '' for the same bits, else a message.

    ``code``: facts on the code that the run imported.
    """
    process = WitnessProcess(recipe, starts, dict(cfg.randomness), [], work_dir, quiet=False)
    try:
        began, shown = time.monotonic(), -1
        while not process.ended():
            done = len(process.done())
            if done != shown:
                shown = done
                say(f'{time.monotonic() - began:4.0f} s  {done} of {len(starts)} trainings')
            time.sleep(POLL)
        say('')
        outcomes = {}
        for start, result in zip(starts, process.results()):
            if result.error:
                outcomes[start.name] = f'not compared: {result.error}'
                continue
            finding = witness_verdict.compare(
                os.path.join(work_dir, FOLDER), result.lines, start.begin, start.until)
            text = ''
            if finding is not None:
                text = witness_verdict.advice_text(finding, edited(code, result.code))
            outcomes[start.name] = text
        return outcomes
    finally:
        process.kill()


def _report(work_dir: str, tries: list[_Try], outcomes: dict[str, str], notes: list[str]
            ) -> Report:
    rows, styles, different, same = [], [], [], []
    for one in tries:
        outcome = one.why_not if one.start is None else outcomes[one.start.name]
        if one.start is None or outcome.startswith('not compared'):
            rows.append((one.title, outcome))
            styles.append('soft')
        elif outcome:
            rows.append((one.title, f'DIFFERENT  {outcome.splitlines()[0]}'))
            styles.append('bad')
            different.append(outcome)
        else:
            rows.append((one.title, f'equal, iterations {one.start.begin} to '
                         f'{one.start.until - 1}'))
            styles.append('good')
            same.append(one.title)
    code, verdict = DONE, f'{SAME}{len(same)} of {len(tries)} were compared'
    if different:
        code, verdict = DIFFERENT, '\n'.join([
            f'DIFFERENT BITS in {len(different)} of {len(different) + len(same)}', different[0]])
    elif not same:
        code, verdict = NOTHING_TO_COMPARE, 'NOTHING WAS COMPARED'
    return Report(work_dir, verdict, code, [Table((), rows, styles=styles)], notes,
                  data=dict(work_dir=work_dir, same=code == DONE, tries=[
                      dict(title=title, outcome=text) for title, text in rows]))
