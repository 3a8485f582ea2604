"""Name the state that a config loses when it resumes: why the variation ``resume`` differs."""
from __future__ import annotations

import copy
import json
import os
import shutil
from typing import Any, NamedTuple

from mmengine.config import Config
from mmengine.hooks import Hook

from ..checkpoint.lost_state import Lost, lost_state, snapshot
from ..errors import TrainingError
from ..fingerprint.divergence import first_divergence
from ..fingerprint.reader import read_ranks
from ..fingerprint.schema import FOLDER
from ..runs.child import Training
from ..runs.config_edits import add_fingerprints
from ..runs.launcher import plan, run_all

CHECKPOINT = 'probe.pth'


def attach(runner: Any, **given: Any) -> None:
    """Let a runner that is about to train write what a :class:`ProbeHook` sees."""
    runner.register_hook(ProbeHook(**given), priority=ProbeHook.priority)


class ProbeHook(Hook):
    """Writes the attributes before iteration ``at`` and after the last iteration to ``out``."""
    priority = 99  # before the hook that ends the training

    def __init__(self, at: int, iterations: int, out: str, save: bool) -> None:
        self._at, self._iterations, self._out, self._save = at, iterations, out, save
        self._seen: dict[str, Any] = {}

    def before_train_iter(self, runner: Any, batch_idx: int, data_batch: Any = None) -> None:
        if runner.iter == self._at:
            self._seen['before'] = snapshot(runner)

    def after_train_iter(self, runner: Any, batch_idx: int, data_batch: Any = None,
                         outputs: dict | None = None) -> None:
        done = runner.iter + 1
        if done == self._at and self._save:
            runner.save_checkpoint(runner.work_dir, CHECKPOINT, by_epoch=False)
        if done == self._iterations:
            self._seen['after'] = snapshot(runner)
            with open(self._out, 'w', encoding='utf-8') as file:
                json.dump(self._seen, file)


class StateVerdict(NamedTuple):
    """The outcome of a probe."""
    # attributes that differ in the resumed run, even after its last iteration
    lost: list[Lost]
    first: str  # field and iteration that differ first; '' when all bits agree
    at: int
    iterations: int

    @property
    def good(self) -> bool:
        return not self.lost and not self.first


def probe(cfg: Config, at: int, iterations: int, work_dir: str) -> StateVerdict:
    """Train ``cfg`` twice for ``iterations``, resume it at ``at``, and compare."""
    recorded = copy.deepcopy(cfg)
    add_fingerprints(recorded, 'step')

    def training(name: str, **more: Any) -> Training:
        folder = os.path.join(work_dir, name)
        shutil.rmtree(folder, ignore_errors=True)  # of an earlier call
        os.makedirs(folder)
        path, out = (os.path.join(folder, file) for file in ('probe.py', 'seen.json'))
        recorded.dump(path)
        given = dict(at=at, iterations=iterations, out=out, save=name == 'run')
        return Training(path, folder, iterations=iterations, attach=f'{__name__}:attach',
                        given=given, **more)

    trainings = [training('run'), training('again'), training(
        'resumed', resume=True, checkpoint=os.path.join(work_dir, 'run', CHECKPOINT))]
    run_all([plan(folder, folder, [training]) for training in trainings
             for folder in [str(training.work_dir)]])
    *runs, resumed = map(_seen, trainings)
    before, after = (lost_state([run[key] for run in runs], resumed[key])
                     for key in ('before', 'after'))
    still = {(row.owner, row.attribute) for row in after}
    # an attribute that is there again after a few iterations is a cache
    lost = [row for row in before if (row.owner, row.attribute) in still]
    logs = [read_ranks(os.path.join(work_dir, name, FOLDER)) for name in ('run', 'resumed')]
    difference = first_divergence(logs[0], logs[1])
    first = f'{difference.field.first_part()[0]} of iteration {difference.iteration}' \
        if difference else ''
    return StateVerdict(lost, first, at, iterations)


def _seen(training: Training) -> dict[str, Any]:
    if not os.path.exists(training.given['out']):
        raise TrainingError(f'the run in {training.work_dir} ended before iteration '
                            f'{training.given["iterations"]}')
    with open(training.given['out'], encoding='utf-8') as file:
        return json.load(file)
