"""Does a config lose state when it resumes? Two runs of it, and a resumed one."""
from __future__ import annotations

import json
import os
from collections.abc import Sequence
from typing import Any, Callable, NamedTuple

from mmengine.config import Config
from mmengine.hooks import Hook

from ..checkpoint.lost_state import Lost, lost_state, snapshot
from ..digests import state_digest
from ..distributed.unwrap import unwrap
from ..runs.child import Training
from ..runs.launcher import PlannedRun, launch_of, run_all
from ..runs.stopping import StopTraining

CHECKPOINT = 'probe.pth'


def attach(runner: Any, **given: Any) -> None:
    """Let a runner that is about to train write what a :class:`ProbeHook` sees."""
    runner.register_hook(ProbeHook(**given), priority=ProbeHook.priority)


class ProbeHook(Hook):
    """Sees the state before iteration ``at`` and after the last one; and every loss between."""
    priority = 100

    def __init__(self, at: int, iterations: int, out: str, save: bool) -> None:
        self._at, self._iterations, self._out, self._save = at, iterations, out, save
        self._seen: dict[str, Any] = dict(losses={})

    def before_train_iter(self, runner: Any, batch_idx: int, data_batch: Any = None) -> None:
        if runner.iter == self._at:
            self._seen['before'] = snapshot(runner)

    def after_train_iter(self, runner: Any, batch_idx: int, data_batch: Any = None,
                         outputs: dict | None = None) -> None:
        done = runner.iter + 1
        if done > self._at:
            self._seen['losses'][runner.iter] = {
                name: float(value.detach()).hex() for name, value in sorted(outputs.items())}
        if done == self._at and self._save:
            runner.save_checkpoint(runner.work_dir, CHECKPOINT, by_epoch=False)
        if done == self._iterations:
            self._seen['after'] = snapshot(runner)
            self._seen['weights'] = state_digest(unwrap(runner.model).state_dict())
            self._seen['optimizer'] = state_digest(runner.optim_wrapper.state_dict())
            with open(self._out, 'w', encoding='utf-8') as file:
                json.dump(self._seen, file)
            raise StopTraining


class StateVerdict(NamedTuple):
    """What came out."""
    # attributes that the resumed run does not have as the uninterrupted one does, not even after
    # its last iteration
    lost: list[Lost]
    # the first iteration whose losses differ, or 'weights', 'optimizer'; '' when all bits agree
    first: str
    at: int
    iterations: int

    @property
    def good(self) -> bool:
        return not self.lost and not self.first


def train_all(trainings: Sequence[Training],
              done: Callable[[PlannedRun], None] = lambda run: None) -> None:
    """Train in fresh processes, one after the other; ``done`` is called with each that ended."""
    run_all([PlannedRun(one.work_dir, one.work_dir,
                        [launch_of(one, os.path.join(one.work_dir, 'output.txt'))])
             for one in trainings], done=done)


def probe(cfg: Config, at: int, iterations: int, work_dir: str,
          train: Callable[[Sequence[Training]], None] = train_all) -> StateVerdict:
    """Run ``cfg`` twice for ``iterations``, resume it at ``at``, and compare.

    Raises:
        TrainingFailed: a run failed; the message has the end of its output.
        RuntimeError: the config ends before ``iterations``.
    """
    def training(name: str, **more: Any) -> Training:
        folder = os.path.join(work_dir, name)
        os.makedirs(folder, exist_ok=True)
        path, out = (os.path.join(folder, file) for file in ('probe.py', 'seen.json'))
        if os.path.exists(out):  # of an earlier call
            os.remove(out)
        cfg.dump(path)
        return Training(path, folder, attach=f'{__name__}:attach', given=dict(
            at=at, iterations=iterations, out=out, save=name == 'run'), **more)

    trainings = [training('run'), training('again'), training(
        'resumed', resume=True, checkpoint=os.path.join(work_dir, 'run', CHECKPOINT))]
    train(trainings)
    *runs, resumed = [_seen(one) for one in trainings]
    before, after = (lost_state([one[key] for one in runs], resumed[key])
                     for key in ('before', 'after'))
    still = {(row.owner, row.attribute) for row in after}
    # what is there again after a few iterations is a cache
    lost = [row for row in before if (row.owner, row.attribute) in still]
    run = runs[0]
    differing = [f'{name} of iteration {iteration}' for iteration, losses in run['losses'].items()
                 for name, value in losses.items()
                 if resumed['losses'].get(iteration, {}).get(name) != value]
    differing += [name for name in ('weights', 'optimizer') if run[name] != resumed[name]]
    return StateVerdict(lost, next(iter(differing), ''), at, iterations)


def _seen(training: Training) -> dict[str, Any]:
    if not os.path.exists(training.given['out']):
        raise RuntimeError(f'the run in {training.work_dir} ended before iteration '
                           f'{training.given["iterations"]}')
    with open(training.given['out'], encoding='utf-8') as file:
        return json.load(file)
