"""Measure the time until a run that resumes at iteration 10,000 begins to train.

    pip install --no-deps --target ONEDL onedl-mmengine
    python benchmarks/resume.py DATA_ROOT [--onedl ONEDL] [--out FILE]

DATA_ROOT is a folder with photographs (`mmrepro demo --data-only`); they are read as JPEG, as
those of COCO are. Stock MMEngine, onedl-mmengine (which skips indices where the sampler can) and
mmrepro, each in processes of its own, one after the other. Prints a Markdown table and writes JSON.
Timed is `Runner.train()` until the first batch is there; the same from the beginning of a run is
the fixed part of it (workers start, two images are loaded). The first row is the rest: until the
sampler yields the index that comes next.
"""
from __future__ import annotations

import argparse
import glob
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from typing import Any

BATCH_SIZE = 2
SIZE = (256, 192)
ROUNDS = 7  # each with all contestants, so that other load of the machine affects all of them

# name: settings of the loop and the loader
CASES: dict[str, dict[str, Any]] = {
    'iterations, no workers': dict(by_epoch=False, workers=0),
    'iterations, 2 workers': dict(by_epoch=False, workers=2),
    'in the middle of an epoch, no workers': dict(by_epoch=True, workers=0),
    'in the middle of an epoch, 2 workers': dict(by_epoch=True, workers=2),
}
INDEX_ONLY = 'iterations, the sampler alone'
CONTESTANTS = {
    'stock': 'MMEngine',
    'onedl': 'onedl-mmengine',
    'mmrepro': 'mmrepro',
}


class Stop(BaseException):
    """Raised to end a run once its figures are known."""


def contest(contestant: str, case: str, iteration: int, folder: str, data: str) -> dict[str, Any]:
    """Resume at ``iteration`` in this fresh process, and stop before the first step."""
    import mmengine
    if case == INDEX_ONLY:
        return find_place(contestant, iteration)
    import torch
    import torch._dynamo  # noqa: F401  the first optimizer would import it, which takes seconds
    from mmengine.config import Config
    from mmengine.hooks import Hook
    from mmengine.runner import Runner
    if contestant == 'mmrepro':
        import mmrepro  # noqa: F401
    else:  # on torch 2.6 and later it cannot load its own checkpoints otherwise
        stock_load = torch.load
        torch.load = lambda *args, **kwargs: stock_load(*args, **{**kwargs, 'weights_only': False})
    loads = register(data, iteration)
    cfg = Config(settings(case, iteration, folder, contestant))

    class Save(Hook):
        def before_train(self, runner: Any) -> None:
            runner.save_checkpoint(folder, 'start.pth', by_epoch=False,
                                   meta=dict(epoch=0, iter=iteration))
            raise Stop

    class Watch(Hook):
        def before_train_iter(self, runner: Any, *args: Any, **kwargs: Any) -> None:
            found['seconds'] = time.perf_counter() - start
            found['at'] = runner.iter
            raise Stop

    found: dict[str, Any] = dict(mmengine=mmengine.__version__)
    if iteration:
        interrupted(Runner.from_cfg(cfg), Save())
        cfg.resume, cfg.load_from = True, os.path.join(folder, 'start.pth')
        cfg.experiment_name += '_resumed'
    runner = Runner.from_cfg(cfg)
    loads.clear()
    start = time.perf_counter()
    interrupted(runner, Watch())
    if not CASES[case]['workers']:  # workers count for themselves
        found['loaded'] = len(loads)
    return found


def find_place(contestant: str, iteration: int) -> dict[str, Any]:
    """Return the least of 20 times until an endless sampler yields the index of ``iteration``."""
    from mmengine.dataset import InfiniteSampler
    from torch.utils.data import DataLoader

    class Numbers(list):
        """A list that takes attributes, as datasets do."""

    images, seconds = Numbers(range(4 * BATCH_SIZE * max(iteration, 5000))), []
    for _ in range(20):
        sampler = InfiniteSampler(images, seed=1)
        loader = DataLoader(images, batch_size=BATCH_SIZE, sampler=sampler)
        if contestant == 'mmrepro':
            from mmrepro.config import RandomnessConfig
            from mmrepro.data.loader import adopt_loader
            from mmrepro.data.passes import seek
            adopt_loader(loader, RandomnessConfig(seed=1), 'sample', 0)
        start = time.perf_counter()
        if contestant == 'mmrepro':
            seek(loader, 0, iteration)
        else:
            sampler.skip(iteration * BATCH_SIZE)
        next(iter(loader.batch_sampler))
        seconds.append(time.perf_counter() - start)
    return dict(seconds=min(seconds), at=iteration)


def interrupted(runner: Any, hook: Any) -> None:
    runner.register_hook(hook, priority=0)
    try:
        runner.train()
    except Stop:
        pass


def register(data: str, iteration: int) -> list[int]:
    """Register a dataset of photographs and a model of one weight; return the loaded indices."""
    import cv2
    import torch
    from mmengine.model import BaseModel
    from mmengine.registry import DATASETS, MODELS
    paths = sorted(glob.glob(os.path.join(data, '*.jpg')))
    loads: list[int] = []

    @DATASETS.register_module()
    class Photographs(torch.utils.data.Dataset):
        metainfo: dict[str, Any] = {}

        def __len__(self) -> int:
            return 4 * BATCH_SIZE * max(iteration, 5000)

        def __getitem__(self, index: int) -> dict[str, Any]:
            loads.append(index)
            image = cv2.resize(cv2.imread(paths[index % len(paths)]), SIZE)
            return dict(x=torch.from_numpy(image).permute(2, 0, 1).contiguous())

    @MODELS.register_module()
    class OneWeight(BaseModel):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.zeros(1))

        def forward(self, x: Any, mode: str = 'tensor') -> Any:
            return dict(loss=self.weight.sum())

    return loads


def write_jpegs(data: str, folder: str) -> None:
    """Write the photographs in ``data`` as JPEG files.

    Raises:
        FileNotFoundError: there are none.
    """
    import cv2
    paths = [path for kind in ('png', 'jpg') for path in
             sorted(glob.glob(os.path.join(data, '**', f'*.{kind}'), recursive=True))]
    if not paths:
        raise FileNotFoundError(f'no *.png or *.jpg in {data}; see `mmrepro demo --data-only`')
    for number, path in enumerate(paths):
        cv2.imwrite(os.path.join(folder, f'{number:03d}.jpg'), cv2.imread(path))


def settings(case: str, iteration: int, folder: str, contestant: str) -> dict[str, Any]:
    chosen = CASES[case]
    sampler = 'DefaultSampler' if chosen['by_epoch'] else 'InfiniteSampler'
    train_cfg = (dict(by_epoch=True, max_epochs=2) if chosen['by_epoch'] else
                 dict(by_epoch=False, max_iters=10 * max(iteration, 100)))
    return dict(
        model=dict(type='OneWeight'), work_dir=folder, experiment_name=f'{contestant}_{iteration}',
        train_dataloader=dict(
            batch_size=BATCH_SIZE, num_workers=chosen['workers'],
            persistent_workers=chosen['workers'] > 0, dataset=dict(type='Photographs'),
            sampler=dict(type=sampler, shuffle=True)),
        train_cfg=train_cfg, optim_wrapper=dict(optimizer=dict(type='SGD', lr=0.1)),
        log_level='ERROR', randomness=dict(seed=1))


def once(contestant: str, case: str, iteration: int, args: Any) -> dict[str, Any]:
    """Run in a fresh process."""
    env = dict(os.environ, OMP_NUM_THREADS='1')
    root = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    path = [args.onedl] if contestant == 'onedl' else []
    env['PYTHONPATH'] = os.pathsep.join([*path, root, env.get('PYTHONPATH', '')])
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, '-W', 'ignore', __file__, args.data, '--child', contestant,
                   case, str(iteration), folder]
        done = subprocess.run(command, env=env, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f'{contestant}, {case}, at {iteration}:\n{done.stderr[-3000:]}')
    return json.loads(done.stdout.splitlines()[-1])


def measure(case: str, contestants: list[tuple[str, int]], args: Any) -> dict[str, Any]:
    """Return medians of several rounds; of a single run where it takes longer than a second."""
    found: dict[tuple[str, int], list[dict[str, Any]]] = {one: [] for one in contestants}
    for _ in range(ROUNDS):
        for (name, iteration), runs in found.items():
            if not runs or runs[0]['seconds'] < 1:
                runs.append(once(name, case, iteration, args))
    rows: dict[str, Any] = {}
    for (name, iteration), runs in found.items():
        seconds = [one['seconds'] for one in runs]
        print(f'{name}, {case}, at {iteration}: {statistics.median(seconds):.3f} s', flush=True)
        rows.setdefault(name, {})['resumed' if iteration else 'new'] = dict(
            runs[0], seconds=statistics.median(seconds), all_seconds=seconds)
    return rows


def table(results: dict[str, Any], names: list[str], iteration: int) -> str:
    lines = [f'| resume at iteration {iteration:,} | '
             + ' | '.join(CONTESTANTS[name] for name in names) + ' | mmrepro, a new run | '
             'images loaded |', '|---|' + '---|' * (len(names) + 2)]
    for case, row in results.items():
        ours, cells, loaded = row['mmrepro'], [], []
        for name in names:
            if name not in row:
                cells.append('has no such thing')
                continue
            if row[name] is None:
                cells.append('begins the epoch again')
                continue
            one = row[name]['resumed']
            ratio = one['seconds'] / ours['resumed']['seconds']
            times = '' if name == 'mmrepro' else f' ({ratio:,.1f} x)'
            cells.append(f'{one["seconds"]:.4g} s{times}')
            loaded.append(str(one.get('loaded', '-')))
        new = f'{ours["new"]["seconds"]:.4g} s' if 'new' in ours else '-'
        lines.append(f'| {case} | {" | ".join(cells)} | {new} | {", ".join(loaded)} |')
    return '\n'.join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('data')
    parser.add_argument('--onedl', help='folder that onedl-mmengine was installed to')
    parser.add_argument('--iteration', type=int, default=10_000)
    parser.add_argument('--out')
    parser.add_argument('--child', nargs=4, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        contestant, case, iteration, folder = args.child
        print(json.dumps(contest(contestant, case, int(iteration), folder, args.data)))
        return
    names = [name for name in CONTESTANTS if name != 'onedl' or args.onedl]
    jpegs = tempfile.TemporaryDirectory()
    write_jpegs(args.data, jpegs.name)
    args.data = jpegs.name
    at = args.iteration
    results: dict[str, Any] = {INDEX_ONLY: measure(
        INDEX_ONLY, [(name, at) for name in names if name != 'stock'], args)}
    for case, chosen in CASES.items():
        # neither of the others can enter an epoch in the middle
        able = ['mmrepro'] if chosen['by_epoch'] else names
        results[case] = {**dict.fromkeys(names), **measure(
            case, [*((name, at) for name in able), ('mmrepro', 0)], args)}
    print(f'\n{table(results, names, args.iteration)}')
    if args.out:
        with open(args.out, 'w') as file:
            json.dump(dict(iteration=args.iteration, batch_size=BATCH_SIZE, results=results), file,
                      indent=1)


if __name__ == '__main__':
    main()
