"""``mmrepro state``: does a config lose state when it resumes? Two runs of it, and a resumed one.

The runs are processes of their own; each writes what it saw to a file.
"""
from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Sequence

from mmengine.config import Config
from mmengine.hooks import Hook

from ..checkpoint.lost_state import Lost, lost_state, snapshot
from ..digests import state_digest
from ..distributed.unwrap import unwrap
from ..runs.stopping import StopTraining, train_until_stopped

__all__ = ['Verdict', 'main', 'probe']

CHECKPOINT = 'probe.pth'
PACKAGE_ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))


class ProbeHook(Hook):
    """Sees the state before iteration ``at`` and after the last one; and every loss between."""
    priority = 100

    def __init__(self, at: int, iterations: int, out: str, save: bool) -> None:
        self._at, self._iterations, self._out, self._save = at, iterations, out, save
        self._seen: Dict[str, Any] = dict(losses={})

    def before_train_iter(self, runner: Any, batch_idx: int, data_batch: Any = None) -> None:
        if runner.iter == self._at:
            self._seen['before'] = snapshot(runner)

    def after_train_iter(self, runner: Any, batch_idx: int, data_batch: Any = None,
                         outputs: Optional[dict] = None) -> None:
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


class Verdict(NamedTuple):
    """What came out.

    Attributes:
        lost: attributes that the resumed run does not have as the uninterrupted one does, not
            even after its last iteration.
        first: the first iteration whose losses differ, or 'weights', 'optimizer'; '' when all
            bits agree.
    """
    lost: List[Lost]
    first: str
    at: int
    iterations: int

    @property
    def good(self) -> bool:
        return not self.lost and not self.first

    def text(self) -> str:
        span = f'iterations {self.at} to {self.iterations - 1}'
        lines = [f'{span}: ' + (f'the resumed run differs first in {self.first}' if self.first else
                                'the resumed run has the bits of the uninterrupted one')]
        if not self.lost:
            return '\n'.join([*lines, 'no attribute is lost' if not self.first else
                              'no attribute explains it: `mmrepro localise` compares operators'])
        lines.append(f'{len(self.lost)} attributes are lost when the run resumes:')
        for row in self.lost:
            lines += [f'  {row.place} ({row.cls}).{row.attribute}',
                      f'      in the uninterrupted run {row.then}, in the resumed one {row.now}']
        lines += ['keep them in checkpoints, in a module that the config imports:',
                  '  from mmrepro.checkpoint import adapters']
        for cls in dict.fromkeys(row.cls for row in self.lost):
            names = ', '.join(repr(row.attribute) for row in self.lost if row.cls == cls)
            lines.append(f"  adapters.register({cls}, {names}, why='...')")
        return '\n'.join(lines)


def start(path: str) -> str:
    """Run a job in a fresh process; returns what it printed."""
    environment = {**os.environ, 'PYTHONPATH': os.pathsep.join(
        filter(None, [PACKAGE_ROOT, os.environ.get('PYTHONPATH')]))}
    print(f'mmrepro state: {os.path.dirname(path)} ...', file=sys.stderr)
    return subprocess.run([sys.executable, '-m', 'mmrepro.verify.state_probe', path],
                          env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                          text=True, check=False).stdout


def probe(cfg: Config, at: int, iterations: int, work_dir: str,
          start: Callable[[str], str] = start) -> Verdict:
    """Run ``cfg`` twice for ``iterations``, resume it at ``at``, and compare.

    Args:
        start: runs the job in this file in a process of its own, returns what it printed.

    Raises:
        RuntimeError: a run failed, with the end of its output.
    """
    def job(name: str, **changes: Any) -> Dict[str, Any]:
        folder = os.path.join(work_dir, name)
        os.makedirs(folder, exist_ok=True)
        own = Config(cfg._cfg_dict.to_dict())
        own.merge_from_dict(dict(work_dir=folder, **changes))
        own.dump(os.path.join(folder, 'probe.py'))
        return dict(config=os.path.join(folder, 'probe.py'), at=at, iterations=iterations,
                    out=os.path.join(folder, 'seen.json'), save=name == 'run')

    def run(job: Dict[str, Any]) -> Dict[str, Any]:
        path = os.path.join(os.path.dirname(job['out']), 'job.json')
        with open(path, 'w', encoding='utf-8') as file:
            json.dump(job, file)
        printed = start(path)
        if not os.path.exists(job['out']):
            end = '\n'.join(printed.splitlines()[-20:])
            raise RuntimeError(f'{end}\nthe run in {os.path.dirname(path)} ended before iteration '
                               f'{iterations}')
        with open(job['out'], encoding='utf-8') as file:
            return json.load(file)

    runs = [run(job(name)) for name in ('run', 'again')]
    resumed = run(job('resumed', resume=True,
                      load_from=os.path.join(work_dir, 'run', CHECKPOINT)))
    before, after = (lost_state([run[key] for run in runs], resumed[key])
                     for key in ('before', 'after'))
    still = {(row.place, row.attribute) for row in after}
    # what is there again after a few iterations is a cache
    lost = [row for row in before if (row.place, row.attribute) in still]
    return Verdict(lost, _first_difference(runs[0], resumed), at, iterations)


def _first_difference(run: Dict[str, Any], resumed: Dict[str, Any]) -> str:
    for iteration, losses in run['losses'].items():
        for name, value in losses.items():
            if resumed['losses'].get(iteration, {}).get(name) != value:
                return f'{name} of iteration {iteration}'
    return next((name for name in ('weights', 'optimizer') if run[name] != resumed[name]), '')


def train_and_see(path: str) -> None:
    """One run; ``path`` is a job of :func:`probe`."""
    from ..runs.start import build_runner
    with open(path, encoding='utf-8') as file:
        job = json.load(file)
    runner = build_runner(Config.fromfile(job.pop('config')))
    runner.register_hook(ProbeHook(**job), priority=ProbeHook.priority)
    train_until_stopped(runner)


def main(argv: Optional[Sequence[str]] = None) -> int:
    """0: nothing is lost; 1: named attributes are lost, or bits differ."""
    from ..runs.start import _load, _parser
    parser = _parser('state', 'Name state in Python attributes that a config loses when it '
                              'resumes.')
    parser.epilog = ('example:\n  %(prog)s configs/demo/yolox_s_demo.py --at 2 --iters 4')
    parser.add_argument('--at', type=int, default=2, metavar='K',
                        help='resume after this many iterations (default: 2)')
    parser.add_argument('--iters', type=int, default=4, metavar='N',
                        help='iterations of the uninterrupted runs (default: 4)')
    parser.add_argument('--json', metavar='FILE', help='write the outcome to a file')
    args = parser.parse_args(argv)
    if not 0 < args.at < args.iters:
        parser.error(f'--at {args.at} --iters {args.iters}: 0 < K < N is needed')
    folder = args.work_dir or tempfile.mkdtemp(prefix='mmrepro-state-')
    try:
        verdict = probe(_load(args, parser), args.at, args.iters, folder)
    finally:
        if args.work_dir is None:
            shutil.rmtree(folder)
    print(verdict.text())
    if args.json:
        with open(args.json, 'w', encoding='utf-8') as file:
            json.dump(dict(verdict._asdict(), lost=[row._asdict() for row in verdict.lost]), file,
                      indent=2)
    return 0 if verdict.good else 1


if __name__ == '__main__':
    train_and_see(sys.argv[1])
