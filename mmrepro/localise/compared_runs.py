"""The two runs that are compared, A and B, and the fresh processes that train them."""
from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Sequence

from ..fingerprint.schema import FOLDER, fingerprint_name
from ..runs.stopping import train_until_stopped
from .recording import RecordingPlan, attach

__all__ = ['RunSegment', 'RunSpec', 'RunFailed', 'run_here', 'start']

CHECKPOINT = 'localise.pth'  # of a run that is interrupted and resumed
ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
TICK = 1.0  # seconds between two looks at the progress
LOG_TAIL = 30  # lines of a failed run's log that are shown


class RunFailed(RuntimeError):
    """A training process ended with an error; the message has the end of its log."""


class RunSpec(NamedTuple):
    """How to train run A or run B.

    Attributes:
        name: 'A' or 'B'.
        config: path of a config that needs no others.
        env: variables to set.
        asked: settings and variables given for this run; `config` and `env` contain them already.
        ranks: processes.
        resume_at: the run is ended before this iteration and continued in another process.
        checkpoint: the run continues from this file.
        validate_at: the run validates before this iteration.
    """
    name: str
    config: str
    env: Dict[str, str] = {}
    ranks: int = 1
    resume_at: Optional[int] = None
    checkpoint: Optional[str] = None
    validate_at: Optional[int] = None
    asked: Dict[str, Any] = {}


class RunSegment(NamedTuple):
    """One process or group of ranks: a run, or a part of it."""
    config: str
    work_dir: str
    plan: RecordingPlan
    checkpoint: Optional[str] = None
    save: bool = False
    launcher: str = 'none'
    validate_at: Optional[int] = None


def run_here(job: RunSegment) -> None:
    """Train in this process, until the plan's last iteration."""
    from mmengine.config import Config

    from ..hooks.fingerprint import FingerprintHook
    from ..runs.child import TurnHook
    from ..runs.start import build_runner
    cfg = Config.fromfile(job.config)
    cfg.work_dir, cfg.launcher = job.work_dir, job.launcher
    if job.checkpoint is not None:
        cfg.resume, cfg.load_from = True, job.checkpoint
    runner = build_runner(cfg)
    if not any(isinstance(hook, FingerprintHook) for hook in runner.hooks):
        runner.register_hook(FingerprintHook(), priority=FingerprintHook.priority)
    if job.validate_at is not None:
        runner.register_hook(TurnHook(validate_after=job.validate_at), priority=TurnHook.priority)
    attach(runner, RecordingPlan(*job.plan))
    train_until_stopped(runner)
    if job.save:
        runner.save_checkpoint(job.work_dir, CHECKPOINT, by_epoch=False,
                               meta=dict(epoch=runner.epoch, iter=runner.iter))


def segments_of(spec: RunSpec, work_dir: str, plan: RecordingPlan) -> List[RunSegment]:
    """The segments of a run, one after the other: two when it is interrupted."""
    launcher = 'pytorch' if spec.ranks > 1 else 'none'
    last = RunSegment(spec.config, work_dir, plan, spec.checkpoint, launcher=launcher,
               validate_at=spec.validate_at)
    if spec.resume_at is None or spec.resume_at > plan.stop:
        return [last]
    first = last._replace(save=True, plan=plan._replace(stop=spec.resume_at - 1))
    if plan.record is not None and plan.record >= spec.resume_at:
        first = first._replace(plan=first.plan._replace(record=None))
    else:
        last = last._replace(plan=plan._replace(record=None))
    return [first, last._replace(checkpoint=os.path.join(work_dir, CHECKPOINT))]


def start(spec: RunSpec, work_dir: str, plan: RecordingPlan,
          count: Callable[[int, int], None] = lambda done, of: None) -> None:
    """Train in fresh processes and wait; ``count`` is called with the number of iterations done.

    Raises:
        RunFailed: when a process ends with an error.
    """
    os.makedirs(work_dir, exist_ok=True)
    fingerprints = os.path.join(work_dir, FOLDER, fingerprint_name(0))
    for number, job in enumerate(segments_of(spec, work_dir, plan)):
        path = os.path.join(work_dir, f'job.{number}.json')
        with open(path, 'w', encoding='utf-8') as file:
            json.dump(job._asdict(), file)
        _run_processes(
            spec, path, [os.path.join(work_dir, f'output.{number}.rank{rank}.txt')
                         for rank in range(spec.ranks)],
            lambda: count(_lines_of(fingerprints), plan.stop + 1))


def _lines_of(path: str) -> int:
    """Iterations in a file of fingerprints that is being written."""
    if not os.path.exists(path):
        return 0
    with open(path, 'rb') as file:
        return sum(line.startswith(b'{"kind":"step"') for line in file)


def _run_processes(spec: RunSpec, job: str, logs: Sequence[str], tick: Callable[[], None]) -> None:
    # a checkout that is not installed has to be found by the child as well
    paths = filter(None, [ROOT, os.environ.get('PYTHONPATH')])
    env = {**os.environ, 'PYTHONPATH': os.pathsep.join(paths), **spec.env}
    if spec.ranks > 1:
        env.update(WORLD_SIZE=str(spec.ranks), MASTER_ADDR='127.0.0.1',
                   MASTER_PORT=str(_free_port()))
    running = []
    for rank, log in enumerate(logs):
        with open(log, 'w', encoding='utf-8') as file:
            own = {**env, 'RANK': str(rank), 'LOCAL_RANK': str(rank)} if spec.ranks > 1 else env
            running.append(subprocess.Popen([sys.executable, '-m', __name__, job], env=own,
                                            stdout=file, stderr=subprocess.STDOUT))
    codes = [_wait(process, tick) for process in running]
    for code, log in zip(codes, logs):
        if code:
            with open(log, encoding='utf-8', errors='replace') as file:
                tail = ''.join(file.readlines()[-LOG_TAIL:])
            raise RunFailed(f'{tail}\nrun {spec.name} failed with exit code {code}; all of its '
                             f'output is in {log}')


def _wait(process: subprocess.Popen, tick: Callable[[], None]) -> int:
    while True:
        try:
            return process.wait(TICK)
        except subprocess.TimeoutExpired:
            tick()


def _free_port() -> int:
    with socket.socket() as one:
        one.bind(('127.0.0.1', 0))
        return one.getsockname()[1]


def main(argv: Sequence[str]) -> int:
    from mmengine.config import Config

    from ..runs.start import restart_if_incomplete
    with open(argv[0], encoding='utf-8') as file:
        fields: Dict[str, Any] = json.load(file)
    plan = RecordingPlan(*fields.pop('plan'))
    keep = {int(rank): number for rank, number in (plan.keep or {}).items()}
    job = RunSegment(**fields, plan=plan._replace(keep=keep))
    randomness = Config.fromfile(job.config, import_custom_modules=False).get('randomness') or {}
    restart_if_incomplete(os.environ, randomness.get('deterministic', False),
                          randomness.get('num_threads'))
    run_here(job)
    return 0


if __name__ == '__main__':
    sys.exit(main(sys.argv[1:]))
