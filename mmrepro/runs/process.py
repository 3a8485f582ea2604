"""Fresh training processes, watched through the fingerprints that they write."""
from __future__ import annotations

import os
import signal
import subprocess
import sys
from typing import Any, Dict, Mapping, NamedTuple, Optional, Sequence

from ..fingerprint.reader import RankLog, read_rank
from ..fingerprint.schema import FOLDER, fingerprint_name

__all__ = ['Fresh', 'Plan', 'TrainingFailed', 'add_fingerprints', 'fingerprints_of',
           'is_fingerprint', 'settings_for']

LOG_TAIL = 30  # lines of a failed run's output that are shown
POLL = 0.2  # seconds between two looks at a process


class TrainingFailed(RuntimeError):
    """A training process ended with an error; the message has the end of its output."""


class Plan(NamedTuple):
    """A training: command line arguments of :mod:`mmrepro.runs.child`, and its environment.

    A variable whose value is None is taken out of the environment.
    """
    config: str
    work_dir: str
    arguments: Sequence[str] = ()
    env: Mapping[str, Optional[str]] = {}
    killed: bool = False  # the process is meant to be killed
    ranks: int = 1
    cwd: Optional[str] = None


class Fresh:
    """A running training. Its output goes to ``WORK_DIR/output.txt``."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        os.makedirs(plan.work_dir, exist_ok=True)
        self.log = os.path.join(plan.work_dir, 'output.txt')
        package = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
        path = os.pathsep.join(filter(None, [package, os.environ.get('PYTHONPATH')]))
        module = ['-m', 'mmrepro.runs.child']
        if plan.ranks > 1:
            module = ['-m', 'torch.distributed.run', '--standalone',
                      f'--nproc_per_node={plan.ranks}', *module]
        env = {**os.environ, **plan.env, 'PYTHONPATH': path}
        with open(self.log, 'ab') as output:
            self.process = subprocess.Popen(
                [sys.executable, *module, plan.config, *plan.arguments], stdout=output,
                stderr=subprocess.STDOUT, cwd=plan.cwd, start_new_session=True,
                env={name: value for name, value in env.items() if value is not None})

    def poll(self) -> bool:
        """Whether it has ended.

        Raises:
            TrainingFailed: it ended with an error.
        """
        code = self.process.poll()
        if code is None:
            return False
        if code == 0 or (self.plan.killed and code == -signal.SIGKILL):
            return True
        with open(self.log, encoding='utf-8', errors='replace') as file:
            tail = ''.join(file.readlines()[-LOG_TAIL:])
        raise TrainingFailed(f'{tail}\nthe training in {self.plan.work_dir} ended with exit code '
                             f'{code}; all of its output is in {self.log}')

    def stop(self) -> None:
        """End it with its workers; it has a session of its own."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()


def fingerprints_of(work_dir: str, rank: int = 0) -> Optional[RankLog]:
    """What is there so far, or None."""
    path = os.path.join(work_dir, FOLDER, fingerprint_name(rank))
    return read_rank(path) if os.path.exists(path) else None


def add_fingerprints(cfg: Any, level: str, interval: int = 1) -> None:
    """One FingerprintHook of this level, in the place of any other."""
    others = [hook for hook in cfg.get('custom_hooks') or [] if not is_fingerprint(hook)]
    cfg.custom_hooks = [*others, dict(type='FingerprintHook', level=level, interval=interval)]


def is_fingerprint(hook: Any) -> bool:
    kind: Any = hook.get('type') if isinstance(hook, Mapping) else None
    return getattr(kind, '__name__', str(kind).rsplit('.', 1)[-1]) == 'FingerprintHook'


def settings_for(threads: Optional[str] = None) -> Dict[str, str]:
    """Environment in which several trainings share a machine: one thread each, unless set."""
    count = threads or os.environ.get('OMP_NUM_THREADS', '1')
    return {'OMP_NUM_THREADS': count, 'MKL_NUM_THREADS': os.environ.get('MKL_NUM_THREADS', count)}
