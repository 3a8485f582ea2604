"""Trainings on virtual ranks under seeded orders, with errors, signals and kills at any point.

A schedule is a number. From it follow the number of processes, the order in which ranks run and
messages arrive, and what happens: nothing, an error in a rank or in what it waits for, a signal to
a process, or the kill of one. A run that was ended goes on from its last checkpoint, on another
number of processes and under another order, until it is complete. dev/schedules.py replays one.
"""
from __future__ import annotations

import gc
import logging
import random
import shutil
import signal
import tempfile
import threading
import traceback
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Callable, NamedTuple

import faults.tiny as tiny_run
import torch
import torch.distributed as dist
from harness import digest
from mmengine.hooks import EMAHook, Hook
from mmengine.registry import MODELS
from mmengine.runner import Runner
from mmengine.runner import runner as runner_module
from mmengine.visualization import Visualizer
from simulated import Event, Killed, Outcome, Simulation
from virtual_processes import results_of
from virtual_runs import whole

from mmrepro.distributed.ordered_sums import shares
from mmrepro.distributed.scheduler import current
from mmrepro.errors import Preempted
from mmrepro.run.hooks.preempt import PreemptHook
from mmrepro.virtual import fsdp2
from mmrepro.virtual.fsdp2 import whole_tensor

RANKS = 4
KINDS = ('quiet', 'error', 'condition', 'kill', 'signal')
POINTS = ('before_train_iter', 'forward', 'backward', 'after_train_iter', 'before_val_iter',
          'before_save_checkpoint', 'after_val_epoch', 'before_train')
ATTEMPTS = 4  # runs of a schedule, resumes included


class Planted(Exception):
    """The error of a schedule."""


class Plan(NamedTuple):
    """What a schedule does to its first run."""
    number: int
    kind: str
    processes: int
    turn: int  # of a signal or kill
    process: int  # that gets it
    rank: int  # of the error
    point: str
    visit: int  # of the point, counted from 0

    @classmethod
    def of(cls, number: int) -> Plan:
        choice = random.Random(number)
        processes = choice.randint(1, RANKS)
        return cls(number, choice.choice(KINDS), processes, choice.randint(1, 400),
                   choice.randrange(processes), choice.randrange(RANKS), choice.choice(POINTS),
                   choice.randrange(4))


@MODELS.register_module(force=True)
class Headed(tiny_run.Tiny):
    """Keeps tensors of its last pass, as the heads of most detectors do, and communicates."""

    def __init__(self, data_preprocessor=None):
        super().__init__(data_preprocessor)
        self.register_buffer('seen', torch.zeros(()))  # of averages, by a hook

    def forward(self, inputs, label, mode='tensor'):
        outputs = super().forward(inputs, label, mode)
        if mode == 'loss':
            self.head.last = dict(label=label, mean=[float(inputs.mean())])
            visit('forward')
            number = torch.tensor(float(len(label)))
            dist.all_reduce(number)
            outputs['loss'] = outputs['loss'] * (len(label) * RANKS / number)
            outputs['loss'].register_hook(lambda gradient: visit('backward'))
        return outputs


class _Run:
    """State of the run under way that its ranks share."""

    def __init__(self, plan: Plan | None) -> None:
        self.plan, self.visits = plan, 0
        self.runners: dict[int, Any] = {}


_run = _Run(None)


def visit(point: str) -> None:
    """Let other ranks run here, and raise the error of the schedule if it is here."""
    plan = _run.plan
    if _run.runners:
        current().wait(lambda: True, point)
    if plan is None or plan.kind not in ('error', 'condition') or (
            plan.point, plan.rank) != (point, dist.get_rank()):
        return
    _run.visits += 1
    if _run.visits == plan.visit + 1:
        if plan.kind == 'error':
            fail(point)
        # raises if another rank was chosen before: its thread evaluates the condition
        mine = threading.get_ident()
        current().wait(lambda: threading.get_ident() == mine or fail(point), point)


def fail(point: str) -> bool:
    raise Planted(point)


class VisitHook(Hook):
    """Hands over at the moments of a run."""
    priority = 'VERY_LOW'


for _name in POINTS:
    if _name not in ('forward', 'backward'):
        setattr(VisitHook, _name, lambda self, *args, _name=_name, **kwargs: visit(_name))


class ReadingHook(Hook):
    """Reads the averages that ranks share before they are updated, as hooks of users may."""
    priority = 'HIGH'

    def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None):
        average, = (hook.ema_model for hook in runner.hooks if isinstance(hook, EMAHook))
        weight = whole_tensor(average.module.head.fc.weight)
        runner.model.module.seen.add_(weight.square().sum())


def config(work_dir: str, memory: str | None = None, interval: int = 1) -> Any:
    cfg = tiny_run.validating_and_saving(work_dir)
    cfg.model.type = 'Headed'
    cfg.train_cfg.max_epochs = 3  # an iteration each; the first two steps are repeated
    # a clock would make schedules that nobody could repeat
    cfg.custom_hooks = [dict(type='EMAHook'), dict(type='PreemptHook', interval=interval)]
    cfg.randomness = dict(seed=3, deterministic=True,
                          virtual_ranks=dict(ranks=RANKS, memory=memory))
    return cfg


def _main(cfg: Any) -> Any:
    def main() -> Any:
        runner = Runner.from_cfg(cfg.copy())
        _run.runners[dist.get_rank()] = runner
        runner.register_hook(VisitHook(), priority='VERY_LOW')
        runner.register_hook(ReadingHook(), priority='HIGH')
        runner.train()
        model = runner.model.module
        return digest(whole([model.state_dict(), runner.optim_wrapper.state_dict(),
                             [hook.ema_model.state_dict() for hook in runner.hooks
                              if hasattr(hook, 'ema_model')],
                             [one.state_dict() for one in runner.param_schedulers]]))
    return main


def _send(simulation: Simulation, process: int) -> None:
    """Deliver SIGTERM to the thread of the lowest rank of a process."""
    lowest = simulation.worlds[process].scheduler.ranks[0].number
    runner = _run.runners.get(lowest)
    for hook in runner.hooks if runner is not None else ():
        if isinstance(hook, PreemptHook) and hook._active:
            hook._receive(signal.SIGTERM, None)


EVENTS = {'signal': _send, 'kill': Simulation.kill}


def train(work_dir: str, seed: int, processes: int, plan: Plan | None = None,
          memory: str | None = None) -> Outcome:
    """Train once under the order of ``seed``; resumes if there is a checkpoint."""
    global _run
    _run = _Run(plan)
    cfg = config(work_dir, memory, random.Random(f'{seed} interval').randint(1, 3))
    cfg.resume = True
    events = [Event(plan.turn, plan.process, EVENTS[plan.kind])] \
        if plan is not None and plan.kind in EVENTS else []
    try:
        return Simulation(seed, RANKS, processes, events).run(_main(cfg))
    finally:
        _run = _Run(None)


class Wrong(AssertionError):
    """A schedule that did not end as promised; its number replays it."""


def _check_errors(plan: Plan, outcome: Outcome) -> None:
    """Raise Wrong unless all processes of the run have ended for the same reason."""
    split = shares(RANKS, plan.processes)
    for process, error in enumerate(outcome.errors):
        allowed: tuple = (type(None), )
        if plan.kind == 'signal':
            allowed += (Preempted, )
        elif plan.kind in ('error', 'condition'):
            allowed += (Planted, ) if plan.rank in split[process] else (RuntimeError, )
        elif plan.kind == 'kill':
            allowed += (Killed, ) if process == plan.process else (RuntimeError, )
        if type(error) not in allowed:
            raise Wrong(f'process {process} has ended with {error!r}') from error
        # a process without an error came to its end before the others failed
        if error is None and not all(rank in outcome.results for rank in split[process]):
            raise Wrong(f'process {process} has ended without a result')
    if plan.kind == 'signal' and len({
            error and error.iteration for error in outcome.errors}) > 1:
        raise Wrong(f'processes were not pre-empted after the same iteration: {outcome.errors}')


def check(number: int, expected: dict[int, Any], folder: str, memory: str | None) -> int:
    """Run a schedule, and return its turns. Raises Wrong if it did not end as promised."""
    plan = Plan.of(number)
    work_dir = tempfile.mkdtemp(dir=folder)
    try:
        outcome = train(work_dir, number, plan.processes, plan, memory)
        turns = outcome.turns
        _check_errors(plan, outcome)
        for attempt in range(1, ATTEMPTS):
            if not any(outcome.errors):
                break
            processes = random.Random(f'{number} {attempt}').randint(1, RANKS)
            outcome = train(work_dir, number + attempt, processes, memory=memory)
            turns += outcome.turns
        failed = next(filter(None, outcome.errors), None)
        if failed is not None:
            raise Wrong(f'the run that went on has ended with {failed!r}') from failed
        for rank in range(RANKS):
            if outcome.results.get(rank) != expected[rank]:
                raise Wrong(f'rank {rank} has different bits')
        return turns
    except BaseException as error:
        raise Wrong(f'schedule {number} ({plan}): {type(error).__name__}: {error}') from error
    finally:
        shutil.rmtree(work_dir, ignore_errors=True)


def reference(folder: str) -> dict[int, Any]:
    """Return the bits of the ranks of one process that run in their order."""
    return results_of(0, 1, _main(config(tempfile.mkdtemp(dir=folder))), RANKS)


def run_many(numbers: list[int], stop: bool = False,
             fault: Callable[[], AbstractContextManager[Any]] = nullcontext,
             memory: str | None = None) -> dict[str, Any]:
    """Run schedules; ``wrong`` has the text of each that did not end as promised.

    ``stop``: behind the first of those. ``fault`` and ``memory`` are of the schedules, not of the
    run that they are compared with, which shares weights.
    """
    logging.disable(logging.CRITICAL)
    fsdp2.SMALLEST = 1  # the layers of this network are blocks
    runner_module.collect_env = dict  # for the log; it starts compilers
    figure = Visualizer._initialize_fig(None, dict(frameon=False))  # for all: nothing is drawn
    Visualizer._initialize_fig = lambda self, fig_cfg: figure
    gc.collect()
    gc.freeze()  # what is imported is never garbage, and is not looked through in every run
    kinds: dict[str, int] = dict.fromkeys(KINDS, 0)
    turns, wrong = 0, []
    with tempfile.TemporaryDirectory() as folder:
        expected = reference(folder)
        for number in numbers:
            try:
                with fault():
                    turns += check(number, expected, folder, memory)
                kinds[Plan.of(number).kind] += 1
            except Wrong as error:
                wrong.append(''.join(traceback.format_exception(None, error, error.__traceback__)))
                if stop:
                    break
    return dict(schedules=len(numbers), turns=turns, kinds=kinds, wrong=wrong)
