"""Train a configuration and report its bits; every variant of a run is a child of this process."""
import copy
import gc
import importlib
import os
import subprocess
import sys
from pathlib import Path

from children import Child, run_all
from mmengine.hooks import Hook
from mmengine.runner import Runner

from mmrepro import ops
from mmrepro.objects.digests import state_digest as digest

__all__ = ['ROOT', 'Child', 'digest', 'environment', 'fresh', 'python', 'run_all', 'train']

# What every training imports for a second or more: once, before processes are forked
for name in ('torch._dynamo', 'matplotlib.pyplot', 'matplotlib.backends.backend_agg',
             'pkg_resources', 'setuptools', 'mmcv.ops', 'mmrepro.run.runner'):
    importlib.import_module(name)
ops.other_providers('cpu')  # imports each operator
gc.freeze()  # collections, of which MMEngine asks for many, need not look at modules

ROOT = Path(__file__).resolve().parents[2]


class _Recorder(Hook):
    priority = 100

    def __init__(self, with_data):
        self.with_data = with_data
        self.result = dict(data=[], loss=[], step=[], metrics=[])

    def before_train_iter(self, runner, batch_idx, data_batch=None):
        if self.with_data:
            self.result['data'].append(digest(data_batch))

    def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None):
        self.result['step'].append(runner.iter)
        self.result['loss'].append({
            name: float(value.detach()).hex() for name, value in sorted(outputs.items())})

    def after_val_epoch(self, runner, metrics=None):
        self.result['metrics'].append({name: repr(v) for name, v in sorted(metrics.items())})

    def after_run(self, runner):
        model = getattr(runner.model, 'module', runner.model)
        self.result['weights'] = digest(model.state_dict())
        self.result['optimizer'] = digest(runner.optim_wrapper.state_dict())
        self.result['seed'] = runner.seed


def train(cfg, work_dir, with_data=True, prepare=lambda runner: None):
    """Train in this process; returns digests of batches, weights, optimizer, and losses as hex."""
    cfg = copy.deepcopy(cfg)
    cfg.work_dir = str(work_dir)
    runner = Runner.from_cfg(cfg)
    prepare(runner)
    recorder = _Recorder(with_data)
    runner.register_hook(recorder, priority=100)
    runner.train()
    return recorder.result


def environment():
    """Environment of a fresh process that finds this checkout and the modules of this folder."""
    path = os.pathsep.join(filter(None, [
        str(ROOT), str(Path(__file__).parent), os.environ.get('PYTHONPATH', '')]))
    return {**os.environ, 'PYTHONPATH': path, 'OMP_NUM_THREADS': '1', 'MKL_NUM_THREADS': '1'}


def fresh(*arguments, code=0, cwd=None, **variables):
    """Run a fresh interpreter that finds this checkout, without the variables that are None.

    ``code`` None: any exit code will do.
    """
    env = {**environment(), **variables}
    done = subprocess.run([sys.executable, '-W', 'ignore', *map(str, arguments)], cwd=cwd,
                          env={name: value for name, value in env.items() if value is not None},
                          capture_output=True, text=True, timeout=1200)
    assert code in (None, done.returncode), (done.stdout + done.stderr)[-4000:]
    return done


def python(*arguments, **options):
    """Run a fresh interpreter as :func:`fresh` does; returns what it prints."""
    return fresh(*arguments, **options).stdout
