"""Runs of one config that differ in what must not matter."""
from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any, Callable, NamedTuple

from mmengine.config import Config
from mmengine.dist import all_gather_object, get_rank, get_world_size
from mmengine.hooks import Hook

from ..digests import state_digest
from ..runs.child import Training
from ..runs.config_edits import without_checkpoints, without_evaluation
from ..runs.launcher import PlannedRun, launch_of, one_thread_each, run_all
from ..runs.reduction import few_images
from .shipped_configs import use_coco_classes, use_data

Record = dict[str, Any]  # of one iteration, see DigestHook
# a line of standard output that starts so carries one iteration as JSON
PREFIX = '@mmrepro-digest '
CHECKPOINT = 'resumed_from.pth'


class DigestHook(Hook):
    """Prints one line per iteration: loss, digest of the weights, digest of the optimizer.

    With several ranks, rank 0 prints its loss and digests of what all of them have.
    """

    priority = 'LOWEST'

    def after_train_iter(self, runner: Any, batch_idx: int, data_batch: Any = None,
                         outputs: dict | None = None) -> None:
        loss = (outputs or {}).get('loss')
        found = dict(
            loss=None if loss is None else float(loss.detach()),
            weights=state_digest(runner.model.state_dict()),
            optimizer=state_digest(runner.optim_wrapper.state_dict()))
        if get_world_size() > 1:
            ranks = all_gather_object(found)
            found.update({name: state_digest([rank[name] for rank in ranks])
                          for name in ('weights', 'optimizer')},
                         losses=[rank['loss'] for rank in ranks])
        record = dict(iteration=runner.iter + 1, epoch=runner.epoch + 1, total=runner.max_iters,
                      **found)
        if get_rank() == 0:
            print(PREFIX + json.dumps(record), file=sys.stdout, flush=True)


class DemoRun(NamedTuple):
    """One of the runs: its name and what is different about it."""
    name: str
    num_workers: int = 0
    hash_seed: str = '0'
    resumed: bool = False  # in two processes: the first ends after an iteration, the second resumes
    virtual_ranks: int | None = None
    processes: int = 1  # that the virtual ranks share

    def title(self) -> str:
        if self.virtual_ranks is not None:
            return f'{self.virtual_ranks} ranks on {self.name}'
        return (f'run {self.name}: num_workers={self.num_workers}, PYTHONHASHSEED={self.hash_seed}'
                + (f', resumed after iteration {SAVED_AFTER}' if self.resumed else ''))


SAVED_AFTER = 1  # iterations
RUNS = (DemoRun('A'), DemoRun('B', num_workers=2, hash_seed='1', resumed=True))


def on_processes(virtual_ranks: int, numbers: Sequence[int]) -> tuple[DemoRun, ...]:
    """The same ranks on these numbers of processes."""
    return tuple(DemoRun(f'{number} process{"es" if number > 1 else ""}', processes=number,
                         virtual_ranks=virtual_ranks) for number in numbers)


def prepare(config: str, run: DemoRun, root: str, coco: bool, images: int, epochs: int) -> Config:
    """The config of one run: few images, no validation, no checkpoints, a digest per iteration."""
    cfg = Config.fromfile(config, import_custom_modules=False)
    use_data(cfg, root)
    if coco:
        use_coco_classes(cfg)
    cfg.train_dataloader.num_workers = run.num_workers
    cfg.train_dataloader.persistent_workers = run.num_workers > 0
    few_images(cfg, 'train', images)
    cfg.train_cfg.max_epochs = epochs
    if run.virtual_ranks is not None:
        cfg.randomness = dict(cfg.get('randomness') or {}, virtual_ranks=run.virtual_ranks)
        cfg.train_dataloader.batch_size = 1
    without_evaluation(cfg)
    without_checkpoints(cfg)
    cfg.custom_hooks = [*cfg.get('custom_hooks', []),
                        dict(type='mmrepro.demo.two_runs.DigestHook')]
    return cfg


def train(run: DemoRun, config: str, folder: str, tell: Callable[[Record], None],
          env: Mapping[str, str] = {}) -> list[Record]:
    """Train in fresh processes; ``tell`` is called with the record of every iteration.

    ``env`` are more variables of theirs.

    Raises:
        TrainingFailed: the training ended with an error.
    """
    logs = os.path.join(folder, 'output.rank{rank}.txt' if run.processes > 1 else 'output.txt')
    for rank in range(run.processes):
        open(logs.replace('{rank}', str(rank)), 'wb').close()
    log = logs.replace('{rank}', '0')
    # one thread per operator is the fastest for images this small, and by far on a busy machine
    env = {**one_thread_each(), 'PYTHONHASHSEED': run.hash_seed, **env}
    records: list[Record] = []

    def look() -> None:
        with open(log, encoding='utf-8', errors='replace') as file:
            # a line without its end is still being written
            lines = [line[len(PREFIX):] for line in file
                     if line.startswith(PREFIX) and line.endswith('\n')]
        for line in lines[len(records):]:
            records.append(json.loads(line))
            tell(records[-1])

    trainings = [Training(config, folder)]
    randomness = Config.fromfile(config, import_custom_modules=False).get('randomness') or {}
    if run.resumed and randomness.get('worker_seed', 'sample') == 'sample':  # others cannot
        trainings = [
            Training(config, folder, iterations=SAVED_AFTER, save=CHECKPOINT),
            Training(config, folder, resume=True, checkpoint=os.path.join(folder, CHECKPOINT))]
    launches = [launch_of(training, logs, env, run.processes) for training in trainings]
    run_all([PlannedRun(run.name, folder, launches)], tick=look)
    return records
