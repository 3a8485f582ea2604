"""Train a configuration in a child of this warm process and report its bits.

Importing MMDetection takes seconds, a step of a small configuration fractions of one: the pytest
process imports once, and every variant of a run is a forked child with its own work directory.
"""
from __future__ import annotations

import copy
import importlib
import multiprocessing
import os
import traceback
from pathlib import Path
from typing import Any, Callable

import torch

from mmrepro.digests import state_digest as digest

# What every training imports on the way, for a second or more: once, before processes are forked
for name in ('torch._dynamo', 'matplotlib.pyplot', 'matplotlib.backends.backend_agg',
             'pkg_resources', 'mmcv.ops', 'mmrepro.runner'):
    importlib.import_module(name)

ROOT = Path(__file__).resolve().parents[2]
TIMEOUT = 600  # seconds; a child that hangs is an error, not a wait


def _recorder(with_data: bool) -> Any:
    from mmengine.hooks import Hook

    class Recorder(Hook):
        priority = 100

        def __init__(self) -> None:
            self.result: dict[str, list] = dict(data=[], loss=[], step=[], metrics=[])

        def before_train_iter(self, runner, batch_idx, data_batch=None):
            if with_data:
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

    return Recorder()


def train(cfg: Any, work_dir: str, with_data: bool = True,
          prepare: Callable[[Any], None] = lambda runner: None) -> dict[str, Any]:
    """Train in this process; returns digests of batches, losses as hex, weights, optimizer."""
    from mmengine.runner import Runner
    cfg = copy.deepcopy(cfg)
    cfg.work_dir = str(work_dir)
    runner = Runner.from_cfg(cfg)
    prepare(runner)
    recorder = _recorder(with_data)
    runner.register_hook(recorder, priority=100)
    runner.train()
    return recorder.result


def _child(connection: Any, function: Callable, args: tuple, kwargs: dict) -> None:
    torch.set_num_threads(1)
    try:
        connection.send((True, function(*args, **kwargs)))
    except BaseException:
        connection.send((False, traceback.format_exc()))
        raise


class Child:
    """A function running in a forked process; ``result()`` waits for what it returns."""

    def __init__(self, function: Callable, *args: Any, **kwargs: Any) -> None:
        context = multiprocessing.get_context('fork')
        self._receive, send = context.Pipe(duplex=False)
        self.process = context.Process(target=_child, args=(send, function, args, kwargs))
        self.process.start()
        send.close()

    def result(self) -> Any:
        try:
            if not self._receive.poll(TIMEOUT):
                raise TimeoutError(f'no result within {TIMEOUT} s')
            good, value = self._receive.recv()
        except EOFError:
            self.process.join()
            raise RuntimeError(f'the child died with exit code {self.process.exitcode}') from None
        finally:
            if self.process.is_alive() and not self._receive.closed:
                self.process.join(30)
                self.process.kill()
        if not good:
            raise RuntimeError(value)
        return value


def run_all(jobs: dict[str, tuple], at_once: int = 2) -> dict[str, Any]:
    """Run ``name -> (function, args, kwargs)`` in forked children, ``at_once`` at a time."""
    results, running = {}, {}
    for name, (function, args, kwargs) in jobs.items():
        if len(running) >= at_once:
            first = next(iter(running))
            results[first] = running.pop(first).result()
        running[name] = Child(function, *args, **kwargs)
    for name, child in running.items():
        results[name] = child.result()
    return results


def environment() -> dict[str, str]:
    """Environment of a fresh process that finds this checkout."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get('PYTHONPATH', '')]))
    return {**os.environ, 'PYTHONPATH': path, 'OMP_NUM_THREADS': '1', 'MKL_NUM_THREADS': '1'}
