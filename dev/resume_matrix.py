"""Resume points x workers x ranks of seven configs: is the resumed run the uninterrupted one?

    python -m dev.resume_matrix --out docs/results/resume_matrix.json [--configs yolox ...]

Each run takes twelve iterations. The uninterrupted run writes no checkpoint; a second one does
after every iteration, and is compared as well. From each of these checkpoints a fresh process
resumes. Compared, as bytes, for every iteration and rank: the batch, the losses, and after the step
the gradients, weights, buffers, optimizer state, averages and learning rates; at the end the logged
lines. Networks with a ResNet have one of depth 18, heads with fully connected layers have 64
channels there, Deformable DETR has three layers of each kind.

Every point with every number of ranks; the ways of loading alternate. There one rank runs to the
end, several run two iterations. ``--all`` adds every other way of loading at every point, for two
iterations. ``--out`` continues a file that stands, row by row.
"""
from __future__ import annotations

import argparse
import copy
import gc
import os
import shutil
import tempfile
import time
from collections.abc import Container
from pathlib import Path
from typing import Any

import one_thread  # noqa: F401  before torch

# isort: split
import torch
from children import Child, ChildFailed, join_ranks, silence_output
from demo_runs import log_lines, shallow_detr, small
from harness import digest

from dev.detector_changes import accumulating, dynamic, light, light_teacher
from dev.matrix_rows import RowFile, lines_differ
from mmrepro.runs.launcher import free_port
from mmrepro.runs.stopping import StopTraining

ITERATIONS = 12
AFTER = 2  # iterations that a resumed run takes which does not go to the end
TIMEOUT = 900  # seconds
# workers, persistent
LOADING = ((0, False), (2, False), (2, True), (4, False), (4, True))


def _switch_late(cfg: Any) -> None:
    """Let the augmentations end in the second half of the run, in the middle of the matrix."""
    for hook in cfg.custom_hooks:
        if hook['type'] == 'YOLOXModeSwitchHook':
            hook['num_last_epochs'] = 2
        if hook['type'] == 'PipelineSwitchHook':
            hook['switch_epoch'] = 2


def _best(cfg: Any) -> None:
    cfg.default_hooks.checkpoint.save_best = 'auto'


# name: (demo config, changes, images of the dataset, batch of all ranks by number of ranks)
CONFIGS = {
    'faster-rcnn': ('faster-rcnn_r50_fpn', (light, ), 6, {1: 2, 2: 2, 3: 3}),
    'yolox': ('yolox_s', (_switch_late, _best), 12, {1: 4, 2: 4, 3: 6}),
    'rtmdet': ('rtmdet_tiny', (_switch_late, _best), 12, {1: 4, 2: 4, 3: 6}),
    'deformable-detr': ('deformable-detr_r50', (shallow_detr, ), 6, {1: 2, 2: 2, 3: 3}),
    'dynamic-rcnn': ('faster-rcnn_r50_fpn', (dynamic, light), 6, {1: 2, 2: 2, 3: 3}),
    'soft-teacher': ('soft-teacher_faster-rcnn_r50', (light_teacher, ), 6, {1: 3, 2: 6, 3: 9}),
    'accumulation': ('retinanet_r50_fpn', (accumulating, light), 6, {1: 2, 2: 2, 3: 3}),
}


def settings(name: str, ranks: int, data_root: str) -> Any:
    """Return the config of a row: twelve iterations for any number of ranks."""
    model, changes, images, batches = CONFIGS[name]
    cfg = small(model, data_root)
    cfg.default_hooks.checkpoint = dict(type='CheckpointHook', interval=1, by_epoch=False,
                                        max_keep_ckpts=-1)
    for change in changes:
        change(cfg)
    loader = cfg.train_dataloader
    loader.batch_size = batches[ranks] // ranks
    if cfg.train_cfg.get('max_epochs'):
        cfg.train_cfg.max_epochs = ITERATIONS * batches[ranks] // images
        cfg.train_cfg.val_interval = 2
    for leaf in loader.dataset.get('datasets', [loader.dataset.get('dataset', loader.dataset)]):
        leaf['indices'] = images
    if ranks > 1:
        cfg.find_unused_parameters = True
        cfg.launcher = 'pytorch'
        cfg.env_cfg.dist_cfg = dict(backend='gloo', timeout=TIMEOUT)
    return cfg


def _averages(runner: Any) -> Any:
    return [hook.ema_model.state_dict() for hook in runner.hooks if hasattr(hook, 'ema_model')]


def _recorder(lines: list[dict[str, Any]], until: int) -> Any:
    from mmengine.hooks import Hook

    class Recorder(Hook):
        def before_train_iter(self, runner, batch_idx, data_batch=None):
            self.data = digest(data_batch)

        def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None):
            model = getattr(runner.model, 'module', runner.model)
            lines.append(dict(
                iteration=runner.iter, epoch=runner.epoch, data=self.data,
                losses={name: float(value.detach()).hex()
                        for name, value in sorted(outputs.items())},
                lr={name: [float(one).hex() for one in values]
                    for name, values in runner.optim_wrapper.get_lr().items()},
                weights=digest(model.state_dict()),
                gradients=digest({name: parameter.grad
                                  for name, parameter in model.named_parameters()}),
                optimizer=digest(runner.optim_wrapper.state_dict()),
                averages=digest(_averages(runner))))
            if runner.iter + 1 == until < ITERATIONS:
                raise StopTraining

        def after_val_epoch(self, runner, metrics=None):
            lines.append(dict(iteration=runner.iter, metrics={
                name: repr(value) for name, value in sorted(metrics.items())}))

    return Recorder()


def _rank(rank: int, ranks: int, port: int, cfg: Any, until: int) -> list[dict[str, Any]]:
    """Train as one process of a run; return its record."""
    from mmengine.runner import Runner
    lines: list[dict[str, Any]] = []
    silence_output()
    join_ranks(rank, ranks, port)
    runner = Runner.from_cfg(cfg)
    runner.register_hook(_recorder(lines, until), priority=100)
    try:
        runner.train()
    except StopTraining:
        pass
    return lines


def run(cfg: Any, ranks: int, work_dir: Path, loading: tuple, resume: str = '',
        until: int = ITERATIONS) -> dict[str, Any]:
    """Train in children; return the records of all ranks and the logged lines.

    Raises:
        RuntimeError: with the text of the error of the first rank that failed.
    """
    cfg = copy.deepcopy(cfg)
    cfg.work_dir = str(work_dir)
    cfg.train_dataloader.merge(dict(num_workers=loading[0], persistent_workers=loading[1]))
    if resume:
        cfg.resume, cfg.load_from = True, resume
    work_dir.mkdir(parents=True)
    port = free_port()
    children = [Child(_rank, rank, ranks, port, cfg, until) for rank in range(ranks)]
    lines = []
    try:
        for rank, child in enumerate(children):
            try:  # without grace: killed, as an interrupted run is
                lines.append(child.result(TIMEOUT, grace=0))
            except ChildFailed as error:
                raise RuntimeError(f'rank {rank}: {error}') from None
    finally:
        for child in children:
            child.process.kill()
    return dict(ranks=lines, logged=log_lines(work_dir))


def first_difference(expected: dict[str, Any], found: dict[str, Any], point: int,
                     until: int = ITERATIONS) -> str:
    """Return where iterations ``point`` to ``until`` of two runs first differ; '' if equal."""
    for rank, (before, after) in enumerate(zip(expected['ranks'], found['ranks'])):
        # the validation that follows the last iteration is there when it ended the run
        before = [line for line in before if point <= line['iteration'] < until
                  or 'metrics' in line and line['iteration'] == until == ITERATIONS]
        if before and after and 'metrics' in before[0] and before[0] != after[0]:
            del before[0]  # the run that wrote the checkpoint had validated already
        difference = lines_differ(rank, before, after)
        if difference:
            return difference
    for step, values in found['logged'].items():
        if expected['logged'][step] != values:
            return f'logged line of step {step}'
    return ''


def rows(configs: list[str], numbers: list[int], all_loading: bool = False
         ) -> list[dict[str, Any]]:
    """Return the rows: config, ranks, point, workers, persistent."""
    table = [dict(config=name, ranks=ranks, point=point, workers=workers, persistent=persistent)
             for ranks in numbers for name in configs for point in range(1, ITERATIONS)
             for workers, persistent in LOADING]
    return table if all_loading else [row for row in table if _has_turn(row)]


def _has_turn(row: dict[str, Any]) -> bool:
    choice = (row['point'] + row['ranks']) % len(LOADING)
    return LOADING[choice] == (row['workers'], row['persistent'])


def fill(table: list[dict[str, Any]], data_root: str, folder: Path, done: Any,
         compared: Container[tuple] = ()) -> None:
    """Run the rows in ``table``; ``done(row)`` is called with 'difference' and 'seconds' added.

    ``compared``: (config, ranks) whose run with checkpoints was compared with the one without.
    """
    import mmdet.datasets
    import mmdet.models  # noqa: F401  once, before the processes are forked
    gc.freeze()  # modules are never garbage, and every process would traverse them
    groups = list(dict.fromkeys((row['config'], row['ranks']) for row in table))
    for name, ranks in groups:
        cfg, where = settings(name, ranks, data_root), folder / f'{name}-{ranks}'
        expected = saving = run(cfg, ranks, where / 'saving', LOADING[1])
        assert len([line for line in saving['ranks'][0] if 'data' in line]) == ITERATIONS
        if (name, ranks) not in compared:
            plain = copy.deepcopy(cfg)
            plain.default_hooks.checkpoint = None
            expected = run(plain, ranks, where / 'base', LOADING[0])
            done(dict(config=name, ranks=ranks, point=0, workers=LOADING[1][0],
                      persistent=LOADING[1][1], difference=first_difference(expected, saving, 0)))
        for row in table:
            if (row['config'], row['ranks']) != (name, ranks):
                continue
            start, point = time.monotonic(), row['point']
            until = ITERATIONS if ranks == 1 and _has_turn(row) else min(
                point + AFTER, ITERATIONS)
            found = run(cfg_without_checkpoints(cfg), ranks,
                        where / '-'.join(map(str, row.values())),
                        (row['workers'], row['persistent']),
                        str(where / 'saving' / f'iter_{point}.pth'), until)
            done(dict(row, difference=first_difference(expected, found, point, until),
                      iterations=until - point, seconds=round(time.monotonic() - start, 1)))
            shutil.rmtree(where / '-'.join(map(str, row.values())))
        shutil.rmtree(where)


def cfg_without_checkpoints(cfg: Any) -> Any:
    cfg = copy.deepcopy(cfg)
    cfg.default_hooks.checkpoint.interval = 100
    return cfg


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--out', required=True)
    parser.add_argument('--configs', nargs='+', choices=list(CONFIGS), default=list(CONFIGS))
    parser.add_argument('--ranks', nargs='+', type=int, default=[1, 2, 3])
    parser.add_argument('--all', action='store_true')
    args = parser.parse_args()
    from mmrepro.demo.dataset import write_dataset
    file = RowFile(args.out, ('config', 'ranks', 'point', 'workers', 'persistent'),
                   torch=torch.__version__, iterations=ITERATIONS)
    table = file.missing(rows(args.configs, args.ranks, args.all))
    with tempfile.TemporaryDirectory() as folder:
        write_dataset(os.path.join(folder, 'data'))
        fill(table, os.path.join(folder, 'data'), Path(folder), file.add,
             {(row['config'], row['ranks']) for row in file.rows if row['point'] == 0})


if __name__ == '__main__':
    main()
