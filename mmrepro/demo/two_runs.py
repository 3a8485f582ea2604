"""Train one config several times, varying what must not matter, and compare the fingerprints."""
from __future__ import annotations

import copy
import functools
import os
import pprint
from collections.abc import Sequence
from typing import Any, Callable, NamedTuple

import torch
from mmengine.config import Config

from .. import ops
from ..activation import deactivate
from ..config import with_virtual_ranks
from ..errors import DIFFERENT, DONE
from ..fingerprint.divergence import Ranks, divergences
from ..fingerprint.reader import read_ranks
from ..objects.digests import state_digest
from ..report.plot_style import figure, palette, png
from ..report.report import Figure, Report
from ..report.table import Table
from ..run.hooks.fingerprint import FingerprintHook
from ..runs.child import Training
from ..runs.config_edits import without_checkpoints, without_evaluation
from ..runs.launcher import jobs_at_once, one_thread_each, plan
from ..runs.progress import run_with_progress
from ..runs.reduction import few_images
from .shipped_configs import use_data


class DigestHook(FingerprintHook):
    """Fingerprints with the digest of the weights that a reader can compute from a checkpoint."""

    def extra(self, runner: Any) -> dict[str, Any]:
        return dict(weights=state_digest(runner.model.state_dict()))


class DemoRun(NamedTuple):
    """A run of the demonstration, and its differences from the others."""
    name: str
    num_workers: int = 0
    hash_seed: str = '0'
    stock: bool = False  # trained by MMEngine's own runner
    killed: bool = False  # the first process is killed, the second resumes
    virtual_ranks: int | None = None
    processes: int = 1  # number of processes that train the virtual ranks

    def title(self) -> str:
        if self.virtual_ranks is not None:
            return f'{self.virtual_ranks} ranks on {self.name}'
        return (f'{self.name}: num_workers={self.num_workers}, PYTHONHASHSEED={self.hash_seed}'
                + (', without mmrepro' if self.stock else '')
                + (f', killed after iteration {KILLED_AFTER}, resumed from the checkpoint of '
                   f'iteration {SAVED_AFTER}' if self.killed else ''))


BATCH = 2  # images of a batch, at most
SAVED_AFTER, KILLED_AFTER = 2, 3  # iterations
RUNS = (DemoRun('stock 1', stock=True), DemoRun('stock 2', num_workers=2, stock=True),
        DemoRun('A'), DemoRun('B', num_workers=2, hash_seed='1', killed=True))


@functools.cache
def _read(config: str) -> Config:
    return Config.fromfile(config, import_custom_modules=False)


def runs_of(config: str, images: int, epochs: int, portable: bool = False) -> list[DemoRun]:
    """Return the runs of one rank that a config can have."""
    cfg = _read(config)
    iterations = epochs * -(-images // min(cfg.train_dataloader.batch_size, BATCH))
    # other streams cannot be resumed exactly, and MMEngine has no portable mode
    killed = iterations > KILLED_AFTER and (
        cfg.get('randomness') or {}).get('worker_seed', 'sample') == 'sample'
    return [run._replace(killed=run.killed and killed) for run in RUNS
            if not (run.stock and portable)]


def on_processes(virtual_ranks: int, numbers: Sequence[int]) -> tuple[DemoRun, ...]:
    """Return runs of the same ranks on these numbers of processes."""
    names = [f'{number} process{"es" if number > 1 else ""}' for number in numbers]
    # runs of one number have names, and so folders, of their own
    return tuple(DemoRun(name + (f' ({i + 1})' if name in names[:i] else ''), processes=number,
                         virtual_ranks=virtual_ranks)
                 for i, (name, number) in enumerate(zip(names, numbers)))


def prepare(config: str, run: DemoRun, root: str, images: int, epochs: int,
            portable: bool = False) -> Config:
    """Return the config of one run: few images, no validation, no checkpoints, fingerprints."""
    cfg = copy.deepcopy(_read(config))
    use_data(cfg, root)
    cfg.train_dataloader.num_workers = run.num_workers
    cfg.train_dataloader.persistent_workers = run.num_workers > 0
    cfg.train_dataloader.batch_size = min(cfg.train_dataloader.batch_size, BATCH)
    few_images(cfg, 'train', images)
    cfg.train_cfg.max_epochs = epochs
    if run.virtual_ranks is not None:
        cfg.randomness = with_virtual_ranks(cfg.get('randomness'), run.virtual_ranks)
        cfg.train_dataloader.batch_size = 1
    if portable:
        cfg.merge_from_dict({'randomness.numerics': dict(cpu='portable', num_threads=1)})
    without_evaluation(cfg)
    without_checkpoints(cfg)
    if run.stock:
        cfg.pop('runner_type', None)
        cfg.randomness = {key: cfg.randomness[key] for key in ('seed', 'deterministic')}
    if run.killed:
        cfg.default_hooks.checkpoint = dict(type='CheckpointHook', by_epoch=False,
                                            interval=SAVED_AFTER, max_keep_ckpts=1)
    cfg.custom_hooks = [*cfg.get('custom_hooks', []),
                        dict(type='mmrepro.demo.two_runs.DigestHook')]
    return cfg


def lack_of_gpus(runs: Sequence[DemoRun]) -> str:
    """Return why all runs use the CPU, if there are fewer GPUs than processes; '' otherwise."""
    devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
    most = max(run.processes for run in runs)
    return '' if not 0 < devices < most else (
        f'{most} processes need {most} GPUs, and there {"is" if devices == 1 else "are"} {devices}')


def train(config: str, runs: Sequence[DemoRun], root: str, work_dir: str, images: int, epochs: int,
          portable: bool, say: Callable[[str], None]) -> list[Ranks]:
    """Train all runs in fresh processes, and return what they recorded."""
    plans, on_cpu = [], portable or bool(lack_of_gpus(runs))
    for run in runs:
        folder = os.path.join(work_dir, run.name.replace(' ', '_'))
        path = os.path.join(folder, 'config.py')
        trainings = [Training(path, folder,
                              prepare=f'{__name__}:only_operators' if run.stock else None)]
        if run.killed:
            trainings = [trainings[0]._replace(kill_after=KILLED_AFTER),
                         trainings[0]._replace(resume=True)]
        # one thread per operator is the fastest for images this small, and by far on a busy machine
        env = {**one_thread_each(), 'PYTHONHASHSEED': run.hash_seed,
               **({'CUDA_VISIBLE_DEVICES': ''} if on_cpu else {})}
        plans.append(plan(run.name, folder, trainings, env, run.processes))
        cfg = prepare(config, run, root, images, epochs, portable)
        with open(path, 'w', encoding='utf-8') as file:  # MMEngine's formatter takes a second
            file.writelines(f'{name} = {pprint.pformat(value, sort_dicts=False)}\n'
                            for name, value in cfg.to_dict().items())
    iterations = epochs * -(-images // (
        cfg.train_dataloader.batch_size * (run.virtual_ranks or 1)))
    jobs = jobs_at_once(max(run.processes for run in runs))
    # the longest run first; one more where cores are shared, as no core is idle at the end then
    run_with_progress(plans[::-1], iterations, say, jobs + (jobs > 1))
    return [read_ranks(planned.folder) for planned in plans]


def only_operators() -> None:
    """Leave this process to MMEngine's own runner; mmcv's operators are provided as before."""
    deactivate()
    ops.install()


def losses_of(run: Ranks) -> list[float]:
    """Return the loss after each iteration of a run."""
    return [float.fromhex(step['losses'].get('loss', 'nan')) for _, step in sorted(
        run[0].steps.items())]


def weights_of(ranks: Ranks, iteration: int) -> str:
    """Return SHA-256 of the weights; of several ranks, of the list of their digests."""
    digests = [ranks[rank].steps[iteration]['weights'] for rank in sorted(ranks)]
    return digests[0] if len(digests) == 1 else state_digest(digests)


def compare(logs: Sequence[Ranks], runs: Sequence[DemoRun]) -> Report:
    """Return a table of all iterations, a plot of the losses, and whether all bits agree.

    The runs without mmrepro are shown, and compared with each other only.
    """
    ours = [log for log, run in zip(logs, runs) if not run.stock]
    stock = [log for log, run in zip(logs, runs) if run.stock]
    counts = [min((len(log.steps) for log in ranks.values()), default=0) for ranks in logs]
    differing = _differing(ours)
    columns = [losses_of(log) if log else [] for log in logs]
    rows = [(str(i + 1), *(f'{losses[i]:.6f}' for losses in columns),
             *(['-', 'NO'] if i in differing else [weights_of(ours[0], i)[:16], 'yes']))
            for i in range(min(counts))]
    names = [run.name for run in runs]
    same = False
    if len(set(counts)) > 1 or not counts[0]:
        verdict = 'DIFFERENT: ' + ', '.join(
            f'{count} iterations in run {name}' for count, name in zip(counts, names))
    elif differing:
        verdict = f'DIFFERENT from iteration {min(differing) + 1} on'
    else:
        same, verdict = True, ('SAME BITS: loss, weights and optimizer state agree after each of '
                               f'{counts[0]} iterations')
    diverged, notes = _differing(stock), []
    if stock:
        notes = ['without mmrepro, the same seed and deterministic=True: ' + (
            f'the runs diverge at iteration {min(diverged) + 1}' if diverged else
            'the runs agree as well in these iterations')]
    table = Table(('iteration', *(f'loss {name}' for name in names), 'weights', 'same bits'), rows)
    curves = Figure('Loss', lambda: loss_curves(runs, columns))
    return Report('', verdict, DONE if same else DIFFERENT, [table], notes,
                  figures=dict(losses=curves))


def _differing(logs: Sequence[Ranks]) -> set[int]:
    """Return iterations, counted from 0, at which runs begin to differ from the first."""
    return {found.iteration for log in logs[1:] for found in divergences(logs[0], log)}


def loss_curves(runs: Sequence[DemoRun], columns: Sequence[Sequence[float]]) -> bytes:
    """Draw the losses as a PNG: runs without mmrepro on the left if there are any.

    Later lines are narrower, so that lines that agree are seen as several.
    """
    kinds = [kind for kind in (True, False) if any(run.stock is kind for run in runs)]
    with figure(1, len(kinds), figsize=(5 * len(kinds), 3.4), squeeze=False, sharey=True) as (
            fig, axes):
        for axis, kind in zip(axes[0], kinds):
            drawn = [pair for pair in zip(runs, columns) if pair[0].stock is kind]
            for number, (color, (run, losses)) in enumerate(zip(palette(len(drawn)), drawn)):
                axis.plot(range(1, len(losses) + 1), losses, color=color, label=run.name,
                          linewidth=1.4 + 2 * (len(drawn) - 1 - number))
            axis.set(title='without mmrepro' if kind else 'with mmrepro', xlabel='iteration')
            axis.legend()
        axes[0][0].set_ylabel('loss')
        return png(fig)
