"""The records of a run: fingerprints of mmrepro, or the logs of MMEngine."""
from __future__ import annotations

import glob
import os
from dataclasses import dataclass, field
from typing import Any

from ..checkpoint.files import load
from ..distributed.agreement import randomness_fields
from ..errors import CheckpointError, ConfigError, EmptyFingerprints, FingerprintError, RunError
from ..facts.collect import read_settings
from ..fingerprint.reader import RankLog, json_lines, only_checkpoints, read_run
from ..fingerprint.schema import FINGERPRINTS, FOLDER, NORMS, fingerprint_name, number
from ..util.files import NUMBER, Rule
from ..util.text import not_a
from . import stock_runs
from .stock_runs import MMCV_LOG

# values that MMEngine logs beside losses and metrics: they differ between any two runs, or count
NOT_RESULTS = {'time', 'data_time', 'memory', 'iter', 'epoch', 'step', 'eta'}
LOGS = os.path.join('vis_data', 'scalars.json')
_LOGGED = {'mode?': str, 'epoch?': int, 'iter?': int, str: Rule(
    lambda value: not isinstance(value, int) or NUMBER.holds(value), 'a number')}


@dataclass
class RunView:
    """The records of one run. Iterations are counted from 0 everywhere."""
    path: str  # work directory
    name: str  # short name for legends
    # rank -> fingerprints; empty for a stock run
    ranks: dict[int, RankLog] = field(default_factory=dict)
    # iteration -> what MMEngine logged in training, as floats
    scalars: dict[int, dict[str, float]] = field(default_factory=dict)
    # step -> metrics that MMEngine logged; its step is the epoch, or the iteration of an iteration-
    # based run
    logged_vals: dict[int, dict[str, float]] = field(default_factory=dict)
    # step of ``logged_vals`` -> the last iteration that was logged before it
    validated_after: dict[int, int] = field(default_factory=dict)
    # name -> value: settings from the dumped config, environment from the log; without a manifest
    facts: dict[str, Any] = field(default_factory=dict)
    recorded: bool = False  # a checkpoint of mmrepro added facts that no log has
    manifest: dict[str, Any] = field(default_factory=dict)  # of the last start
    # manifest of the start that the later starts continue
    began: dict[str, Any] = field(default_factory=dict)
    checkpoints: dict[str, str] = field(default_factory=dict)  # file name -> path
    starts: int = 0  # how often the run was started, from its beginning on
    notes: list[str] = field(default_factory=list)  # torn lines, missing files, and so on
    old: bool = False  # of mmcv 1.x and MMDetection 2.x

    @property
    def kind(self) -> str:
        if self.ranks:
            return 'fingerprints'
        return 'mmcv log' if self.old else 'MMEngine log'

    @property
    def attached(self) -> bool:
        """Whether it is known that mmrepro ran it: it writes all of `randomness` into the config.
        """
        return bool(self.ranks or self.manifest) or 'randomness.worker_seed' in self.facts

    @property
    def log(self) -> RankLog:
        """Fingerprints of the lowest recorded rank; without iterations for a stock run."""
        return self.ranks[min(self.ranks)] if self.ranks else RankLog('', [], {}, [], False, [])

    @property
    def iterations(self) -> list[int]:
        """Recorded or logged iterations."""
        return sorted(self.log.steps or self.scalars)

    def losses(self, exact: bool) -> dict[int, dict[str, float]]:
        """Return iteration -> losses: of the fingerprints if ``exact``, else of the log."""
        if not exact:
            return {i: {name: value for name, value in row.items() if 'loss' in name}
                    for i, row in self.scalars.items()}
        return {i: {name: number(value) for name, value in (step.get('losses') or {}).items()}
                for i, step in self.log.steps.items()}

    @property
    def norms(self) -> dict[int, dict[str, float]]:
        """Iteration -> L2 norm of every parameter; empty below level 'parameter'."""
        return {i: {name: number(value) for name, value in step[NORMS].items()}
                for i, step in self.log.steps.items() if step.get(NORMS)}

    def vals(self, exact: bool) -> dict[int, dict[str, float]]:
        """Return step -> metrics of a validation; ``exact``: iterations trained before it."""
        if not exact:
            return self.logged_vals
        return {val['iteration']: {name: number(value) for name, value in val['metrics'].items()}
                for val in self.log.vals}


def load_run(path: str, checkpoints: bool = False) -> RunView:
    """Read a run.

    Args:
        path: a work directory, its ``mmrepro`` folder, a time-stamped folder of MMEngine, a
            ``scalars.json``, or a ``.log.json`` of mmcv 1.x.
        checkpoints: read the last checkpoint for what logs and config do not say.

    Raises:
        RunError: the path holds no run, or a file of it is damaged.
    """
    if not os.path.exists(path):
        raise RunError(not_a('run', path))
    if path.endswith('.pth'):
        raise RunError(f'{not_a("run", path)}: give its folder, whose checkpoints are compared too')
    path = os.path.normpath(path)
    logs = [path] if os.path.isfile(path) else _logs(path)
    if os.path.basename(path) == FOLDER and not logs:
        path = os.path.dirname(path) or '.'
        logs = _logs(path)
    work_dir = path if os.path.isdir(path) else os.path.dirname(path) or '.'
    view = RunView(work_dir, os.path.basename(os.path.abspath(work_dir)))
    try:
        folder = os.path.join(work_dir, FOLDER)
        # without FingerprintHook, the folder has what a witness needs, or nothing
        if os.path.isdir(folder) and any(map(FINGERPRINTS.fullmatch, os.listdir(folder))):
            _read_fingerprints(view)
        whole = [log for log in logs if _read_log(view, log)]
    except FingerprintError as error:
        raise RunError(str(error)) from error
    if not view.ranks and not view.scalars:
        lacking = ('nothing to compare' if view.notes else
                   f'neither {FOLDER}/{fingerprint_name(0)} nor */{LOGS} nor *{MMCV_LOG}')
        raise RunError('; '.join([f'{path}: {lacking}{only_checkpoints(work_dir)}', *view.notes]))
    if len(whole) > 1:
        earlier = os.path.relpath(whole[-2], work_dir).split(os.sep)[0]
        view.notes.append(f'{len(whole)} trainings began in {path}; the last of them is compared. '
                          f'For the log of another, give its folder: {path}/{earlier}')
    view.checkpoints = {os.path.basename(file): file
                        for file in sorted(glob.glob(os.path.join(work_dir, '*.pth')))}
    if not view.manifest:
        _read_facts(view, logs, checkpoints)
    return view


def _read_fingerprints(view: RunView) -> None:
    try:
        run = read_run(view.path)
    except EmptyFingerprints as error:
        view.notes.append(str(error))
        return
    view.ranks = run.ranks
    view.notes += run.notes
    starts = [start['iteration'] for start in max(
        (log.starts for log in run.ranks.values()), key=len, default=[])]
    begun = [number for number, iteration in enumerate(starts) if not iteration]
    view.starts = len(starts) - (begun[-1] if begun else 0)
    for rank, log in run.ranks.items():
        if not log.ended:
            last = max(log.steps, default=None)
            view.notes.append(f'rank {rank} did not come to its end; its last iteration is {last}')
    if run.manifests:
        view.manifest = run.manifests[-1]
        # several trainings may have begun in a folder: the last start that resumed nothing
        view.began = next((manifest for manifest in reversed(run.manifests)
                           if not manifest.get('resumed_from')), run.manifests[0])


def _logs(folder: str) -> list[str]:
    """Return the logs of all starts, the oldest first, as MMEngine names folders by time."""
    places = LOGS, os.path.join('*', LOGS), 'scalars.json', f'*{MMCV_LOG}'
    return sorted(log for place in places
                  for log in glob.glob(os.path.join(glob.escape(folder), place)))


def _read_log(view: RunView, path: str) -> bool:
    """Add the log of a start; iterations that it repeats replace earlier ones.

    Return whether it replaces all of them: a training that began at the first iteration.
    """
    first, whole = True, False
    rows = [row for _, row in json_lines(path, _LOGGED, view.notes, tail=2)]
    view.old = path.endswith(MMCV_LOG)
    if view.old:
        rows = stock_runs.as_mmengine(path, rows, view.notes)
    for row in rows:
        step = row.get('iter', row.get('step'))  # MMEngine counts iterations from 1
        if not isinstance(step, int):
            continue
        values = {name: float(value) for name, value in row.items()
                  if name not in NOT_RESULTS and isinstance(value, (int, float))}
        iteration = step - 1 if 'iter' in row else step
        if 'iter' in row:
            if first:  # a resumed run: what was trained after the checkpoint was lost
                for lost in [i for i in view.scalars if i >= iteration]:
                    del view.scalars[lost]
                for lost in [i for i, last in view.validated_after.items() if last >= iteration]:
                    del view.logged_vals[lost], view.validated_after[lost]
                first, whole = False, not view.scalars
                if whole:
                    view.logged_vals.clear()
                    view.validated_after.clear()
            view.scalars[iteration] = values
        elif values:
            view.logged_vals.setdefault(iteration, {}).update(values)
            view.validated_after[iteration] = max(view.scalars, default=-1)
    if not view.ranks:
        view.starts = 1 if whole else view.starts + 1
    return whole


def _read_facts(view: RunView, logs: list[str], checkpoints: bool) -> None:
    """Read settings and environment of the newest start, and what its checkpoint adds."""
    meta = _last_meta(view) if checkpoints else {}
    texts = [*filter(None, map(stock_runs.config_text, reversed(logs))), *(
        ('last checkpoint', str(meta[key]).encode()) for key in ('config', 'cfg') if key in meta)]
    for path, text in texts:
        try:
            settings = read_settings(text)
        except ConfigError as error:
            view.notes.append(f'{path}: not read: {error}')
            continue
        randomness = settings.get('randomness') or {}
        view.old, view.facts = stock_runs.facts_of(settings)
        if isinstance(randomness, dict):
            view.facts.update(randomness_fields(randomness))
        break
    else:
        view.notes.append(f'{view.path}: no config to compare (vis_data/config.py)')
    written = meta.get('mmrepro')
    kept: Any = written.get('facts') if isinstance(written, dict) else None
    told = stock_runs.recorded(stock_runs.lines_of_meta(meta))
    logged: dict[str, Any] = {}
    for log in logs[-1:]:
        logged.update(stock_runs.recorded(stock_runs.lines_of_meta(stock_runs.head_of(log))))
        logged.update(stock_runs.recorded(stock_runs.text_log(log)))
    seeds = [facts.get('randomness.seed') for facts in (told, logged)]
    if None not in seeds and seeds[0] != seeds[1]:
        view.notes.append(f'its last checkpoint has seed {seeds[0]}, its last log {seeds[1]}: they '
                          'are of two trainings')
        kept = None
    view.recorded = isinstance(kept, dict)
    # in the form of logs where these tell it, because the other run may have nothing else
    view.facts = {**(kept if view.recorded else {}), **view.facts, **told, **logged}


def _last_meta(view: RunView) -> dict[str, Any]:
    """Return the meta of the newest checkpoint; {} without one, or if it is damaged."""
    path = max(view.checkpoints.values(), key=os.path.getmtime, default='')
    try:
        return dict(load(path, map_location='meta').get('meta') or {}) if path else {}
    except (CheckpointError, AttributeError, TypeError, ValueError) as error:
        view.notes.append(f'{path}: {str(error).splitlines()[0]}')
        return {}
