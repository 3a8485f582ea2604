"""Train one config with mmrepro and without, and compare every iteration."""
from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence

import torch
from mmengine.config import Config

from ..config import with_virtual_ranks
from ..demo.dataset import use_data
from ..errors import DIFFERENT, DONE
from ..fingerprint.divergence import Ranks, divergences
from ..fingerprint.reader import read_ranks
from ..objects.digests import state_digest
from ..report.plots import figure, palette, png
from ..report.report import Figure, Report, Table
from ..runs.config_edits import few_images
from ..runs.launcher import jobs_at_once
from ..util.text import counted
from . import variations
from .variations import Variation

BATCH = 2  # images of a batch, at most
SAVED_AFTER, KILLED_AFTER = 2, 3  # iterations
STOCK = 'stock'  # begins the names of runs that MMEngine's own runner trains
ONLY_OPERATORS = 'mmrepro.demo:only_operators'


def demo(config: str, data: str, work_dir: str, *, images: int, epochs: int = 2,
         virtual_ranks: int | None = None, processes: Sequence[int] = (1, 2),
         portable: bool = False, on_start: Callable[[str], None] = lambda text: None,
         on_progress: Callable[[str], None] = lambda text: None) -> Report:
    """Train a config several times in fresh processes, and compare the weights.

    With one rank: twice by MMEngine's own runner with other numbers of workers, and twice by that
    of mmrepro, where one run is killed and resumed. With virtual ranks: on several numbers of
    processes.

    Args:
        config: path of a config.
        data: folder of the demonstration dataset.
        work_dir: where the runs write.
        images: number of images.
        epochs: number of epochs over these images.
        virtual_ranks: number of virtual ranks; None: one rank.
        processes: numbers of processes that train the virtual ranks.
        portable: train on the CPU with the bits of every x86-64 CPU.
        on_start: called with lines that a reader should see before the trainings.
        on_progress: called with lines about the progress.

    Returns:
        A report whose exit code is 0 if the runs with mmrepro have the same bits, else 1.

    Raises:
        TrainingFailed: a training ended with an error.
    """
    cfg = prepare(Config.fromfile(config, import_custom_modules=False), data, images, epochs,
                  virtual_ranks, portable)
    batch = cfg.train_dataloader.batch_size * (virtual_ranks or 1)
    iterations = epochs * -(-images // batch)
    if virtual_ranks is None:
        runs = runs_of(cfg, iterations, portable)
    else:
        runs = on_processes(virtual_ranks, processes)
    lack = '' if portable else lack_of_gpus(runs)
    if lack:
        on_start(f'{lack}: all runs use the CPU')
    if lack or portable:
        runs = {name: _on_cpu(run) for name, run in runs.items()}
    jobs = jobs_at_once(max(run.processes for run in runs.values()))
    if jobs > 1:  # cores are shared: with one run more, none is idle at the end
        jobs += 1
    # the longest run first
    variations.train(cfg, work_dir, dict(reversed(runs.items())), iterations, SAVED_AFTER,
                     jobs, 'step', on_progress, to_the_end=True)
    return compare({name: read_ranks(os.path.join(work_dir, name.replace(' ', '_')))
                    for name in runs}, [run.title for run in runs.values()])


def prepare(cfg: Config, data: str, images: int, epochs: int, virtual_ranks: int | None = None,
            portable: bool = False) -> Config:
    """Reduce a config in place to a few images; returns it."""
    use_data(cfg, data)
    cfg.train_dataloader.num_workers = 0
    cfg.train_dataloader.persistent_workers = False
    cfg.train_dataloader.batch_size = min(cfg.train_dataloader.batch_size, BATCH)
    few_images(cfg, 'train', images)
    cfg.train_cfg.max_epochs = epochs
    if virtual_ranks is not None:
        cfg.randomness = with_virtual_ranks(cfg.get('randomness'), virtual_ranks)
        cfg.train_dataloader.batch_size = 1
    if portable:
        cfg.merge_from_dict({'randomness.numerics': dict(cpu='portable', num_threads=1)})
    return cfg


def runs_of(cfg: Config, iterations: int, portable: bool = False) -> dict[str, Variation]:
    """Return the runs of one rank that a config can have, by name."""
    streams = (cfg.get('randomness') or {}).get('worker_seed', 'sample')
    # other streams cannot be resumed exactly
    killed = iterations > KILLED_AFTER and streams == 'sample'
    end = ''
    if killed:
        end = (f', killed after iteration {KILLED_AFTER}, resumed from the checkpoint of iteration '
               f'{SAVED_AFTER}')
    runs = {
        'stock 1': Variation('stock 1: num_workers=0, PYTHONHASHSEED=0, without mmrepro', _stock,
                             prepare=ONLY_OPERATORS),
        'stock 2': Variation('stock 2: num_workers=2, PYTHONHASHSEED=0, without mmrepro',
                             _stock_workers, prepare=ONLY_OPERATORS),
        'A': Variation('A: num_workers=0, PYTHONHASHSEED=0', _digests),
        'B': Variation(f'B: num_workers=2, PYTHONHASHSEED=1{end}',
                       _resumed_workers if killed else _workers,
                       env=lambda: {'PYTHONHASHSEED': '1'}, kill=killed),
    }
    # MMEngine has no portable mode
    return {name: run for name, run in runs.items() if not (portable and name.startswith(STOCK))}


def _digests(cfg: Config, at: int) -> None:
    cfg.custom_hooks[-1].update(type='mmrepro.demo.DigestHook')


def _workers(cfg: Config, at: int) -> None:
    _digests(cfg, at)
    cfg.train_dataloader.num_workers = 2
    cfg.train_dataloader.persistent_workers = True


def _resumed_workers(cfg: Config, at: int) -> None:
    _workers(cfg, at)
    variations.keep_checkpoint(cfg, at)


def _stock(cfg: Config, at: int) -> None:
    _digests(cfg, at)
    cfg.pop('runner_type', None)
    cfg.randomness = {key: cfg.randomness[key] for key in ('seed', 'deterministic')}


def _stock_workers(cfg: Config, at: int) -> None:
    _workers(cfg, at)
    _stock(cfg, at)


def on_processes(virtual_ranks: int, numbers: Sequence[int]) -> dict[str, Variation]:
    """Return runs of the same ranks on these numbers of processes, by name."""
    runs: dict[str, Variation] = {}
    for index, number in enumerate(numbers):
        name = f'{number} process{"es" if number > 1 else ""}'
        if name in runs:  # a run is not compared with itself
            name += f' ({index + 1})'
        runs[name] = Variation(f'{virtual_ranks} ranks on {name}', _digests, processes=number)
    return runs


def lack_of_gpus(runs: Mapping[str, Variation]) -> str:
    """Return why all runs use the CPU, if there are fewer GPUs than processes; '' otherwise."""
    devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
    most = max(run.processes for run in runs.values())
    if not 0 < devices < most:
        return ''
    verb = 'is' if devices == 1 else 'are'
    return f'{most} processes need {most} GPUs, and there {verb} {devices}'


def _on_cpu(run: Variation) -> Variation:
    return run._replace(env=lambda: {**run.env(), 'CUDA_VISIBLE_DEVICES': ''})


def losses_of(run: Ranks) -> list[float]:
    """Return the loss after each iteration of a run."""
    return [float.fromhex(step['losses'].get('loss', 'nan')) for _, step in sorted(
        run[0].steps.items())]


def weights_of(ranks: Ranks, iteration: int) -> str:
    """Return SHA-256 of the weights; of several ranks, of the list of their digests."""
    digests = [ranks[rank].steps[iteration]['weights'] for rank in sorted(ranks)]
    return digests[0] if len(digests) == 1 else state_digest(digests)


def compare(logs: Mapping[str, Ranks], titles: Sequence[str] = ()) -> Report:
    """Return a table of all iterations, a plot of the losses, and whether all bits agree.

    Runs without mmrepro, whose names begin with :data:`STOCK`, are compared with each other only.
    """
    ours = [ranks for name, ranks in logs.items() if not name.startswith(STOCK)]
    stock = [ranks for name, ranks in logs.items() if name.startswith(STOCK)]
    counts = {name: min((len(log.steps) for log in ranks.values()), default=0)
              for name, ranks in logs.items()}
    differing = _differing(ours)
    losses = {name: losses_of(ranks) if ranks else [] for name, ranks in logs.items()}
    rows = []
    for i in range(min(counts.values())):
        end = ['-', 'NO'] if i in differing else [weights_of(ours[0], i)[:16], 'yes']
        rows.append((str(i + 1), *(f'{values[i]:.6f}' for values in losses.values()), *end))
    code, count = DIFFERENT, next(iter(counts.values()))
    if len(set(counts.values())) > 1 or not count:
        verdict = 'DIFFERENT: ' + ', '.join(
            f'{counted(count, "iteration")} in run {name}' for name, count in counts.items())
    elif differing:
        verdict = f'DIFFERENT from iteration {min(differing) + 1} on'
    else:
        code, verdict = DONE, ('SAME BITS: loss, weights and optimizer state agree after each of '
                               f'{counted(count, "iteration")}')
    table = Table(('iteration', *(f'loss {name}' for name in logs), 'weights', 'same bits'), rows)
    return Report('', verdict, code, [table], _notes(stock),
                  figures=dict(losses=Figure('Loss', lambda: loss_curves(losses))),
                  data=dict(runs=list(titles)))


def _notes(stock: Sequence[Ranks]) -> list[str]:
    """Return notes on the runs without mmrepro, if there are any."""
    if not stock:
        return []
    diverged = _differing(stock)
    end = 'the runs agree as well in these iterations'
    if diverged:
        end = f'the runs diverge at iteration {min(diverged) + 1}'
    return [f'without mmrepro, the same seed and deterministic=True: {end}']


def _differing(logs: Sequence[Ranks]) -> set[int]:
    """Return iterations, counted from 0, at which runs begin to differ from the first."""
    return {found.iteration for log in logs[1:] for found in divergences(logs[0], log)}


def loss_curves(losses: Mapping[str, Sequence[float]]) -> bytes:
    """Draw the losses as a PNG: runs without mmrepro on the left if there are any.

    Later lines are narrower, so that lines that agree are seen as several.
    """
    parts = {'without mmrepro': {name: values for name, values in losses.items()
                                 if name.startswith(STOCK)},
             'with mmrepro': {name: values for name, values in losses.items()
                              if not name.startswith(STOCK)}}
    parts = {title: runs for title, runs in parts.items() if runs}
    with figure(1, len(parts), figsize=(5 * len(parts), 3.4), squeeze=False, sharey=True) as (
            fig, axes):
        for axis, (title, runs) in zip(axes[0], parts.items()):
            lines = zip(palette(len(runs)), runs.items())
            for number, (color, (name, values)) in enumerate(lines):
                axis.plot(range(1, len(values) + 1), values, color=color, label=name,
                          linewidth=1.4 + 2 * (len(runs) - 1 - number))
            axis.set(title=title, xlabel='iteration')
            axis.legend()
        axes[0][0].set_ylabel('loss')
        return png(fig)
