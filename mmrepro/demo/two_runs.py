"""Train one config several times, varying what must not matter, and compare the fingerprints."""
from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from mmengine.config import Config

from ..config import with_virtual_ranks
from ..digests import state_digest
from ..exit_codes import DIFFERENT, DONE
from ..fingerprint.divergence import Ranks, divergences
from ..hooks.fingerprint import FingerprintHook
from ..report.report import Report
from ..report.table import Table
from ..runs.child import Training
from ..runs.config_edits import without_checkpoints, without_evaluation
from ..runs.launcher import PlannedRun, one_thread_each, plan
from ..runs.reduction import few_images
from .shipped_configs import use_data

CHECKPOINT = 'resumed_from.pth'


class DigestHook(FingerprintHook):
    """Fingerprints with the digest of the weights that a reader can compute from a checkpoint."""

    def extra(self, runner: Any) -> dict[str, Any]:
        return dict(weights=state_digest(runner.model.state_dict()))


class DemoRun(NamedTuple):
    """A run of the demonstration, and its differences from the others."""
    name: str
    num_workers: int = 0
    hash_seed: str = '0'
    resumed: bool = False  # the first process ends after an iteration, the second resumes
    virtual_ranks: int | None = None
    processes: int = 1  # number of processes that train the virtual ranks

    def title(self) -> str:
        if self.virtual_ranks is not None:
            return f'{self.virtual_ranks} ranks on {self.name}'
        return (f'run {self.name}: num_workers={self.num_workers}, PYTHONHASHSEED={self.hash_seed}'
                + (f', resumed after iteration {SAVED_AFTER}' if self.resumed else ''))


SAVED_AFTER = 1  # iterations
RUNS = (DemoRun('A'), DemoRun('B', num_workers=2, hash_seed='1', resumed=True))


def on_processes(virtual_ranks: int, numbers: Sequence[int]) -> tuple[DemoRun, ...]:
    """Return runs of the same ranks on these numbers of processes."""
    return tuple(DemoRun(f'{number} process{"es" if number > 1 else ""}', processes=number,
                         virtual_ranks=virtual_ranks) for number in numbers)


def prepare(config: str, run: DemoRun, root: str, images: int, epochs: int,
            portable: bool = False) -> Config:
    """Return the config of one run: few images, no validation, no checkpoints, fingerprints.

    Args:
        portable: with the bits of every x86-64 CPU.
    """
    cfg = Config.fromfile(config, import_custom_modules=False)
    use_data(cfg, root)
    cfg.train_dataloader.num_workers = run.num_workers
    cfg.train_dataloader.persistent_workers = run.num_workers > 0
    few_images(cfg, 'train', images)
    cfg.train_cfg.max_epochs = epochs
    if run.virtual_ranks is not None:
        cfg.randomness = with_virtual_ranks(cfg.get('randomness'), run.virtual_ranks)
        cfg.train_dataloader.batch_size = 1
    if portable:
        cfg.merge_from_dict({'randomness.numerics': dict(cpu='portable', num_threads=1)})
    without_evaluation(cfg)
    without_checkpoints(cfg)
    cfg.custom_hooks = [*cfg.get('custom_hooks', []),
                        dict(type='mmrepro.demo.two_runs.DigestHook')]
    return cfg


def planned(run: DemoRun, config: str, folder: str, env: Mapping[str, str] = {}) -> PlannedRun:
    """Return the fresh processes that train a run.

    Args:
        env: more variables of the processes.
    """
    # one thread per operator is the fastest for images this small, and by far on a busy machine
    env = {**one_thread_each(), 'PYTHONHASHSEED': run.hash_seed, **env}
    trainings = [Training(config, folder)]
    randomness = Config.fromfile(config, import_custom_modules=False).get('randomness') or {}
    if run.resumed and randomness.get('worker_seed', 'sample') == 'sample':  # others cannot
        trainings = [
            Training(config, folder, iterations=SAVED_AFTER, save=CHECKPOINT),
            Training(config, folder, resume=True, checkpoint=os.path.join(folder, CHECKPOINT))]
    return plan(run.name, folder, trainings, env, run.processes)


def loss_of(step: Mapping[str, Any]) -> str:
    """Return the loss of an iteration for a table."""
    value = step['losses'].get('loss')
    return '-' if value is None else f'{float.fromhex(value):.8f}'


def weights_of(ranks: Ranks, iteration: int) -> str:
    """Return SHA-256 of the weights; of several ranks, of the list of their digests."""
    digests = [ranks[rank].steps[iteration]['weights'] for rank in sorted(ranks)]
    return digests[0] if len(digests) == 1 else state_digest(digests)


def compare(runs: Sequence[Ranks], names: Sequence[str]) -> Report:
    """Return a table of all iterations, and whether all bits agree."""
    counts = [min((len(log.steps) for log in run.values()), default=0) for run in runs]
    differing = {found.iteration for run in runs[1:] for found in divergences(runs[0], run)}
    rows = [(str(i + 1), *(loss_of(run[0].steps[i]) for run in runs),
             *(weights_of(run, i)[:16] for run in runs), 'NO' if i in differing else 'yes')
            for i in range(min(counts))]
    same = False
    if len(set(counts)) > 1 or not counts[0]:
        verdict = 'DIFFERENT: ' + ', '.join(
            f'{count} iterations in run {name}' for count, name in zip(counts, names))
    elif differing:
        verdict = f'DIFFERENT from iteration {min(differing) + 1} on'
    else:
        same, verdict = True, ('SAME BITS: loss, weights and optimizer state agree after each of '
                               f'{counts[0]} iterations')
    header = ('iteration', *(f'loss {name}' for name in names),
              *(f'weights {name}' for name in names), 'same bits')
    return Report('', verdict, DONE if same else DIFFERENT, [Table(header, rows)])
