"""Train detectors to their end.

    python -m dev.full_training --compiled FOLDER [--folder FOLDER] [--runs NAME ...]

Each run is a process, started as users start it: stock MMDetection's ``tools/train.py`` with a
compiled mmcv (``--compiled FOLDER``, where pip installed it), or ``mmrepro train``. A run that is
among the results is not made again, so that the study goes on where it was stopped.
"""
from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

from . import digits

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / 'docs' / 'results' / 'full_training.json'
DETECTORS = {'rtmdet_tiny': 'rtm_cls'}  # -> the layers that tell classes apart
METRIC = 'coco/bbox_mAP'


class Run(NamedTuple):
    """How a training differs from one with seed 0, one thread and data loaded in its process."""
    way: str  # 'stock' or 'mmrepro'
    options: tuple[str, ...] = ()  # of --cfg-options
    variables: tuple[tuple[str, str], ...] = ()
    packages: tuple[str, ...] = ()  # that are installed in front of the environment's
    killed_after: float = 0.  # part of the epochs, then resumed; 0: not killed


STREAMS = {'initial weights': 'init', 'order': 'sampler', 'augmentation': 'sample'}
WORKERS = 'train_dataloader.num_workers={}'
RUNS = {
    # one seed, as users start it again
    'stock': Run('stock'),
    'mmrepro': Run('mmrepro'),
    'stock, 2 workers': Run('stock', (WORKERS.format(2),)),
    'mmrepro, 2 workers': Run('mmrepro', (WORKERS.format(2),), (('PYTHONHASHSEED', '7'),)),
    'stock, resumed': Run('stock', killed_after=.5),
    'mmrepro, resumed': Run('mmrepro', killed_after=.5),
    'stock, 4 workers': Run('stock', (WORKERS.format(4),)),
    # another environment
    'two threads': Run('mmrepro', ('randomness.numerics.num_threads=2',)),
    'AVX2': Run('mmrepro', ('randomness.numerics.cpu=avx2',)),
    'OpenCV 4.11': Run('mmrepro', packages=('opencv-python-headless==4.11.0.86',)),
    'Intel Xeon': Run('mmrepro'),  # on a CPU of the other maker than all others
    # other seeds
    **{f'seed {seed}': Run('mmrepro', (f'randomness.seed={seed}',)) for seed in range(1, 10)},
    # another seed for one stream
    **{f'{name} {seed}': Run('mmrepro', (f'randomness.streams.{stream}={seed}',))
       for seed in range(1, 4) for name, stream in STREAMS.items()},
    'stock again': Run('stock'),
}


def command(run: Run, config: Path, work_dir: Path, compiled: Path) -> tuple[list[str], str]:
    """Return the command of a run, and its PYTHONPATH."""
    options = ['randomness.deterministic=True', 'randomness.seed=0', *run.options]
    if run.way == 'stock':
        import mmdet
        tool = Path(mmdet.__file__).parent / '.mim' / 'tools' / 'train.py'
        start, path = [sys.executable, str(tool)], str(compiled)
    else:
        start, path = [sys.executable, '-m', 'mmrepro', 'train'], str(ROOT)
    return [*start, str(config), '--work-dir', str(work_dir), '--cfg-options', *options], path


def train(run: Run, config: Path, work_dir: Path, compiled: Path, folder: Path) -> None:
    """Train to the end; the output is in ``train.log`` of the work directory."""
    line, path = command(run, config, work_dir, compiled)
    overlays = [str(installed(one, folder)) for one in run.packages]
    env = {**os.environ, 'OMP_NUM_THREADS': '1', **dict(run.variables),
           'PYTHONPATH': os.pathsep.join([*overlays, path])}
    if run.way == 'stock':  # MMEngine 0.10.7 reads its checkpoints only like this since torch 2.6
        env['TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD'] = '1'
    shutil.rmtree(work_dir, ignore_errors=True)
    work_dir.mkdir(parents=True)
    with open(work_dir / 'train.log', 'a', encoding='utf-8') as log:
        started = subprocess.Popen(line, cwd=folder, env=env, stdout=log, stderr=log,
                                   start_new_session=True)
        if run.killed_after:
            from mmengine.config import Config
            epoch = int(Config.fromfile(config).train_cfg.max_epochs * run.killed_after)
            _kill_after(started, work_dir / f'epoch_{epoch}.pth')
            started = subprocess.Popen([*line, '--resume'], cwd=folder, env=env, stdout=log,
                                       stderr=log, start_new_session=True)
        if started.wait():
            raise SystemExit(f'{work_dir}/train.log: exit code {started.returncode}')


def pretrain(detector: str, compiled: Path, folder: Path) -> str:
    """Write weights to begin from, without the layers of classes; return their digest."""
    import torch
    kept = folder / 'pretrained' / f'{detector}.pth'
    if not kept.exists():
        config = Path(__file__).with_name(f'{detector}_pretrain.py')
        work_dir = folder / 'runs' / config.stem
        train(Run('mmrepro'), config, work_dir, compiled, folder)
        weights = {name: value for name, value in last_checkpoint(work_dir)['state_dict'].items()
                   if DETECTORS[detector] not in name}
        kept.parent.mkdir(exist_ok=True)
        torch.save(dict(state_dict=weights), kept)
    return digest_of(torch.load(kept)['state_dict'])


def _kill_after(process: subprocess.Popen[bytes], checkpoint: Path) -> None:
    last = checkpoint.with_name('last_checkpoint')  # written when the checkpoint is whole
    while not (last.exists() and last.read_text().endswith(checkpoint.name)):
        if process.poll() is not None:
            raise SystemExit(f'{checkpoint} was not written')
        time.sleep(0.2)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def installed(requirement: str, folder: Path) -> Path:
    """Return the folder with a package without its dependencies; install it if needed."""
    target = folder / 'packages' / requirement.replace('==', '-')
    if not target.exists():
        subprocess.run([sys.executable, '-m', 'pip', 'install', '--quiet', '--no-deps',
                        '--only-binary', ':all:', '--target', str(target), requirement], check=True)
    return target


def result(work_dir: Path) -> dict[str, Any]:
    """Return what a training ended with: metrics of its validations, a digest of the weights."""
    metrics: dict[int, float] = {}  # a validation that a resume repeats is there twice
    for log in sorted(work_dir.glob('*/vis_data/scalars.json')):
        for row in map(json.loads, log.read_text().splitlines()):
            if METRIC in row:
                metrics[row['step']] = row[METRIC]
    checkpoint = last_checkpoint(work_dir)
    return dict(epochs=sorted(metrics), mAP=[metrics[epoch] for epoch in sorted(metrics)],
                weights=digest_of(checkpoint['state_dict'], checkpoint.get('ema_state_dict', {})))


def last_checkpoint(work_dir: Path) -> dict[str, Any]:
    import torch
    last = (work_dir / 'last_checkpoint').read_text()
    checkpoint: dict[str, Any] = torch.load(last, map_location='cpu', weights_only=False)
    return checkpoint


def digest_of(*weights: dict[str, Any]) -> str:
    """Return a digest of names and bits."""
    import torch
    digest = hashlib.sha256()
    for name, value in itertools.chain.from_iterable(sorted(one.items()) for one in weights):
        digest.update(name.encode())
        if isinstance(value, torch.Tensor):
            digest.update(value.contiguous().numpy().tobytes())
    return digest.hexdigest()[:16]


def machine() -> dict[str, str]:
    """Return CPU and versions, which each row holds."""
    with open('/proc/cpuinfo', encoding='utf-8') as file:
        lines = [line.split(':', 1)[1].strip() for line in file
                 if line.startswith(('model name', 'flags'))]
    level = 'AVX-512' if 'avx512f' in lines[1].split() else 'AVX2'
    return dict(cpu=f'{lines[0]}, {level}', torch=version('torch'), mmdet=version('mmdet'))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--folder', type=Path, default=ROOT / 'work_dirs' / 'full_training')
    parser.add_argument('--compiled', type=Path, required=True)
    parser.add_argument('--detectors', nargs='+', choices=tuple(DETECTORS),
                        default=tuple(DETECTORS))
    parser.add_argument('--runs', nargs='+', choices=tuple(RUNS), default=tuple(RUNS))
    args = parser.parse_args()
    args.folder = args.folder.resolve()
    if not (args.folder / 'data' / 'digits').exists():
        digits.write(args.folder / 'data' / 'digits')
    for detector in args.detectors:
        begins = pretrain(detector, args.compiled.resolve(), args.folder)
        print(f'{detector} begins from the weights {begins}', flush=True)
        for name in args.runs:
            results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
            rows = results.setdefault(detector, {})
            if name in rows:
                continue
            work_dir = args.folder / 'runs' / detector / name.replace(', ', '-').replace(' ', '-')
            train(RUNS[name], Path(__file__).with_name(f'{detector}.py'), work_dir,
                  args.compiled.resolve(), args.folder)
            rows[name] = {**result(work_dir), 'begins': begins, **machine()}
            print(detector, name, rows[name]['mAP'][-1], rows[name]['weights'], flush=True)
            RESULTS.write_text(_text(results))


def _text(results: dict[str, Any]) -> str:
    """Return the results as JSON, a line for each run."""
    parts = []
    for detector, rows in results.items():
        lines = ',\n'.join(f'  {json.dumps(name)}: {json.dumps(row)}' for name, row in rows.items())
        parts.append(f' {json.dumps(detector)}: {{\n{lines}}}')
    return '{\n' + ',\n'.join(parts) + '}\n'


if __name__ == '__main__':
    main()
