"""Train a config in fresh processes, vary what must not matter, and compare the bits.

Or let a second process repeat and resume a run that has ended, or that is still going.
"""
from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from ..checkpoint.files import load
from ..checkpoint.fit import lacks
from ..config import with_virtual_ranks
from ..demo import use_data, write_dataset
from ..errors import (
    DIFFERENT,
    DONE,
    NOTHING_TO_COMPARE,
    CheckpointError,
    ConfigError,
    MMReproError,
    RunError,
)
from ..facts.own_code import edited
from ..fingerprint.schema import FOLDER
from ..localise import search
from ..localise.search import LocaliseResult, first_difference
from ..report.report import Report, Table
from ..runs.config_edits import prepare, virtual_ranks
from ..runs.config_files import config_of, read_config
from ..runs.launcher import TrainingFailed, jobs_at_once
from ..selfcheck import witness_verdict
from ..selfcheck.recipe import FILE, Recipe, Registered
from ..selfcheck.witness import REPEATED, REPEATED_ITERATIONS, RESUMED_ITERATIONS
from ..selfcheck.witness_process import Start, WitnessProcess
from ..selfcheck.witness_verdict import Finding
from ..util.files import or_none, read_json
from ..util.text import counted, listed, page
from . import variations
from .variations import USUAL, VARIATIONS, VariationResult

OnProgress = Callable[[str], None]
# variations that are events of a run, not changes of its config: parameters of localise_config
EVENTS = {'resume': 'resume_b', 'validation': 'validate_b'}
SAME = ('SAME BITS: batches, losses, gradients, parameters, buffers, optimizer state and averages '
        'agree after every iteration')


def verify(config: str, *, vary: Sequence[str] | None = None, iterations: int = 5,
           level: str = 'step', full: bool = False, ranks: int | None = None,
           demo_data: str | None = None, options: Mapping[str, Any] | None = None,
           jobs: int | None = None, work_dir: str = os.path.join('work_dirs', 'verify'),
           at: int | None = None, explain: bool = False,
           on_progress: OnProgress = lambda text: None) -> Report:
    """Train a config in fresh processes, vary what must not matter, and compare the bits.

    Args:
        config: path of a config, or ``package::path``.
        vary: names of variations (:data:`mmrepro.verbs.variations.VARIATIONS`);
            None: the usual variations.
        iterations: number of iterations of each run.
        level: level of the fingerprints, ``'step'``, ``'parameter'`` or ``'module'``.
        full: images, batch and weights as in the config, instead of small ones.
        ranks: number of virtual ranks of each run; None: as in the config.
        demo_data: folder for the demonstration dataset, to train on it.
        options: dotted key -> value, changes of the config.
        jobs: runs at a time; None: as many as the machine has room for.
        work_dir: where the runs write.
        at: iterations before the resume and the validation; None: half of them.
        explain: name the cause of the first variation that differs.
        on_progress: called with lines about the progress.

    Returns:
        A report whose exit code is 0 (same bits), 1 (different) or 3 (nothing was compared).

    Raises:
        ConfigError: the config or an option cannot be used.
        MissingDataError: a file that the config reads does not exist.
        TrainingFailed: a training ended with an error.
    """
    names = list(dict.fromkeys(USUAL if vary is None else vary))
    unknown = [name for name in names if name not in VARIATIONS]
    if unknown or not names:
        raise ConfigError(f'--vary: {", ".join(unknown) or "nothing"} is not allowed; allowed: '
                          f'{",".join(VARIATIONS)}')
    if at is not None and not 0 < at < iterations:
        raise ConfigError(f'--at {at} --iters {iterations}: 0 < K < N is needed')
    cfg = config_of(config, options)
    if ranks is not None:
        cfg.randomness = with_virtual_ranks(cfg.get('randomness'), ranks)
    if vary is None and virtual_ranks(cfg) is not None:
        names.append('ranks')
    notes = []
    if demo_data is not None:
        write_dataset(demo_data)
        use_data(cfg, os.path.abspath(demo_data))
        notes.append(f'data: the demonstration dataset in {demo_data}')
    notes += prepare(cfg, names, full)
    started, at = time.monotonic(), at or max(1, iterations // 2)
    data = dict(config=config, iterations=iterations, level=level, work_dir=work_dir)
    try:
        results = variations.train_and_compare(cfg, work_dir, names, iterations, at,
                                               jobs or jobs_at_once(), level, on_progress)
    except TrainingFailed as error:
        if error.finding is None:
            raise
        return Report(
            config, 'DIFFERENT BITS within one run, before it was compared with others:\n'
            f'{error.finding}\nAll of its output is in {error.log}', DIFFERENT, notes=notes,
            data=dict(data, same=False, variations=[], finding=error.finding, log=error.log))
    notes.append(f'{counted(iterations, "iteration")}, fingerprints of level {level}, '
                 f'{time.monotonic() - started:.0f} s')
    notes += variations.changed_meanwhile(results, work_dir)
    cause = _cause(results, work_dir, iterations, at) if explain else None
    return certificate(config, results, notes, work_dir, data, cause)


def certificate(config: str, results: Sequence[VariationResult], notes: Sequence[str],
                work_dir: str, data: Mapping[str, Any] = {},
                cause: LocaliseResult | None = None) -> Report:
    """Report verified variations."""
    rows, styles = zip(*map(_row, results))
    different = [result for result in results if result.difference is not None]
    code, verdict, advice = DONE, SAME, []
    if different:
        code = DIFFERENT
        verdict = (f'DIFFERENT BITS in {len(different)} of {len(results)} variations. Both runs '
                   f'are in {work_dir}; to see them side by side:')
        advice = ['mmrepro compare '
                  f'{os.path.join(work_dir, different[0].reference)} '
                  f'{os.path.join(work_dir, different[0].name)}']
    elif not any(result.equal for result in results):
        code, verdict = NOTHING_TO_COMPARE, 'NOTHING WAS COMPARED'
    elif any(result.remark for result in results):
        verdict += '; with other instruction sets, batches do'
    tables = [Table((), rows, styles=styles)]
    if cause is not None:
        tables.append(first_difference(cause))
    return Report(
        config, verdict, code, tables, list(notes), advice, data={
            **data, 'same': code == DONE, 'localise': cause.as_dict() if cause else None,
            'variations': [dict(
                name=result.name, title=result.title, equal=result.equal,
                skipped=result.skipped or None, remark=result.remark or None,
                difference=result.difference.as_dict() if result.difference else None)
                for result in results]})


def _row(result: VariationResult) -> tuple[tuple[str, str, str], str]:
    """Return the cells of a variation, and the style of its row."""
    if result.skipped:
        return (result.name, result.title, f'not run: {result.skipped}'), 'soft'
    if result.difference is not None:
        return (result.name, result.title, f'DIFFERENT  {result.difference.text()}'), 'bad'
    text = f'equal ({result.remark})' if result.remark else 'equal'
    return (result.name, result.title, text), 'good'


def _cause(results: Sequence[VariationResult], work_dir: str, iterations: int,
           at: int) -> LocaliseResult | None:
    """Name the cause of the first variation that differs; see :func:`mmrepro.verbs.localise`."""
    first = next((result for result in results if result.difference is not None), None)
    if first is None:
        return None
    name = first.name
    # both runs of a variation with `only` differ by design from iteration 0 on
    if VARIATIONS[name].prepare or VARIATIONS[name].elsewhere or VARIATIONS[name].only:
        print(f'\n{name}: mmrepro localise cannot repeat the surroundings of this run; the field '
              f"that differs first says where to look ({page('how-to/my-runs-differ.md')})",
              file=sys.stderr)
        return None
    reference, run = (os.path.join(work_dir, which) for which in (first.reference, name))
    folder = search.unused_folder(os.path.join(work_dir, 'localise'))
    os.makedirs(folder, exist_ok=True)
    try:
        if name not in EVENTS:
            print(f'\nmmrepro localise {reference} {run}', file=sys.stderr, flush=True)
            return search.localise_runs(reference, run, folder)
        # the reference's config has no validation that run B could do
        config = os.path.join(reference if name == 'resume' else run, 'config.py')
        print(f'\nmmrepro localise {config} --{EVENTS[name].replace("_", "-")} {at} --iters '
              f'{iterations}', file=sys.stderr, flush=True)
        event: dict[str, Any] = {EVENTS[name]: at}
        return search.localise_config(config, folder, iterations, **event)
    except MMReproError as error:
        print(error, file=sys.stderr)
        return None


POLL = 0.2  # seconds between two looks at the witness
SHAPE = {'runner': str, 'registered': [[str]], 'path': [str], 'folder': str,
         'script': or_none(str), 'arguments': [str], 'config': str, 'not_rebuilt': str,
         'hooks': [str], 'names': [str], 'first': int, 'code': dict}
_SAME_BITS = 'SAME BITS: '


class _Trial(NamedTuple):
    """A repetition or resume for a witness."""
    title: str
    start: Start | None
    why_not: str = ''


def verify_run(work_dir: str, on_progress: Callable[[str], None] = lambda text: None) -> Report:
    """Repeat the first iterations of a run, resume it from its checkpoints, and compare the bits.

    Nothing in ``work_dir`` is changed.

    Args:
        work_dir: of a run with ``deterministic=True``.
        on_progress: called with lines about the progress.

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
    starts = [trial.start._replace(metrics=metrics) for trial in tries if trial.start is not None]
    notes = []
    if noted['hooks']:
        notes.append('hooks that code has registered are left out: '
                     f'{listed(noted["hooks"])}')
    outcomes = _run(recipe, starts, cfg, work_dir, noted['code'], on_progress) if starts else {}
    return _report(work_dir, tries, outcomes, notes)


def _repetition(noted: Any, steps: set[int]) -> list[_Trial]:
    title = 'repeated from the seed, with another number of workers'
    if noted['first'] != 0:
        return [_Trial(title, None, 'this run was resumed itself')]
    until = next((number for number in range(REPEATED_ITERATIONS) if number not in steps),
                 REPEATED_ITERATIONS)
    if until == 0:
        return [_Trial(title, None, 'its first iterations were not noted')]
    return [_Trial(title, Start(REPEATED, 0, until, None, other_workers=True))]


def _resumes(work_dir: str, steps: set[int]) -> list[_Trial]:
    """Return the checkpoints in a work directory: those of no use, then in order of iterations."""
    found = []
    for name in sorted(os.listdir(work_dir)):
        if not name.endswith('.pth') or name.startswith('.'):
            continue
        path = os.path.join(work_dir, name)
        title = f'resumed from {name}'
        try:
            content = load(path, mapped=True)
        except CheckpointError as error:
            found.append((0, _Trial(title, None, f'the file cannot be read: {error}')))
            continue
        problem = lacks(content)
        if problem is not None:
            found.append((0, _Trial(title, None, problem)))
            continue
        iteration = content['meta']['iter']
        compared = [step for step in range(iteration, iteration + RESUMED_ITERATIONS)
                    if step in steps]
        trial = _Trial(title, None, 'no iteration after the checkpoint was noted')
        if compared:
            trial = _Trial(title, Start(
                f'resumed{len(found)}', iteration, compared[-1] + 1, os.path.abspath(path),
                other_workers=True))
        found.append((iteration, trial))
    return [trial for _, trial in sorted(found, key=lambda pair: pair[0])]


class _Found(NamedTuple):
    """What a training of a witness has found."""
    finding: Finding | str | None  # a difference, why nothing was compared, or None: the same bits
    code: dict[str, str] = {}  # facts on the code that it has imported

    def in_batch(self) -> bool:
        return isinstance(self.finding, Finding) and self.finding.of_batch


def _run(recipe: Recipe, starts: list[Start], cfg: Any, work_dir: str, code: dict[str, str],
         on_progress: Callable[[str], None]) -> dict[str, str]:
    """Return the outcome of each start: '' for the same bits, else a message.

    ``code``: facts on the code that the run imported.
    """
    found = _trained(recipe, starts, cfg, work_dir, on_progress)
    # workers can change a batch, and nothing else
    alike = [start._replace(other_workers=False) for start in starts
             if start.checkpoint is not None and found[start.name].in_batch()]
    again = _trained(recipe, alike, cfg, work_dir, on_progress) if alike else {}
    return {start.name: _outcome(start, found[start.name], again.get(start.name), code)
            for start in starts}


def _outcome(start: Start, found: _Found, again: _Found | None, code: dict[str, str]) -> str:
    """Return the message on a start; ``again`` is that with as many workers as the run."""
    finding = found.finding
    if finding is None:
        return ''
    if isinstance(finding, str):
        return f'not compared: {finding}'
    if again is not None and again.finding is None:
        return witness_verdict.workers_text(finding, start.begin)
    if again is not None and isinstance(again.finding, Finding):
        finding = again.finding
    return witness_verdict.advice_text(finding, edited(code, found.code))


def _trained(recipe: Recipe, starts: list[Start], cfg: Any, work_dir: str,
             on_progress: Callable[[str], None]) -> dict[str, _Found]:
    """Let one witness train all starts, and compare each with the run."""
    process = WitnessProcess(recipe, starts, dict(cfg.randomness), [], work_dir, quiet=False)
    try:
        began, shown = time.monotonic(), -1
        while not process.ended():
            done = len(process.done())
            if done != shown:
                shown = done
                on_progress(f'{time.monotonic() - began:4.0f} s  {done} of {len(starts)} trainings')
            time.sleep(POLL)
        on_progress('')
        return {start.name: _Found(result.error or witness_verdict.compare(
            os.path.join(work_dir, FOLDER), result.lines, start.begin, start.until), result.code)
            for start, result in zip(starts, process.results())}
    finally:
        process.kill()


def _report(work_dir: str, tries: list[_Trial], outcomes: dict[str, str], notes: list[str]
            ) -> Report:
    rows, styles, different, same = [], [], [], []
    for trial in tries:
        outcome = trial.why_not if trial.start is None else outcomes[trial.start.name]
        if trial.start is None or outcome.startswith('not compared'):
            rows.append((trial.title, outcome))
            styles.append('soft')
        elif outcome:
            rows.append((trial.title, f'DIFFERENT  {outcome.splitlines()[0]}'))
            styles.append('bad')
            different.append(outcome)
        else:
            rows.append((trial.title, f'equal, iterations {trial.start.begin} to '
                         f'{trial.start.until - 1}'))
            styles.append('good')
            same.append(trial.title)
    code, verdict = DONE, f'{_SAME_BITS}{len(same)} of {len(tries)} were compared'
    if different:
        code, verdict = DIFFERENT, '\n'.join([
            f'DIFFERENT BITS in {len(different)} of {len(different) + len(same)}', different[0]])
    elif not same:
        code, verdict = NOTHING_TO_COMPARE, 'NOTHING WAS COMPARED'
    return Report(work_dir, verdict, code, [Table((), rows, styles=styles)], notes,
                  data=dict(work_dir=work_dir, same=code == DONE, tries=[
                      dict(title=title, outcome=text) for title, text in rows]))
