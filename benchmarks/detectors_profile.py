"""Say where an iteration of twelve detectors spends its time, beside stock MMDetection.

    python benchmarks/detectors_profile.py DATA_ROOT [--models NAME ...] [--size 320x224]
        [--iterations N] [--out FILE]
    python benchmarks/detectors_profile.py --draw FILE

DATA_ROOT and compiled mmcv as for benchmarks/detectors.py, whose configs these are. Each way trains
in a fresh process with one thread, under torch's profiler, which counts the time of each operator
without those that it calls. What the functions of ``mmcv._ext`` call counts as theirs, so that
mmcv's compiled operators and those of mmrepro are compared as a whole. "Python" is the rest of an
iteration, the profiler's own work included. ``--draw`` makes the figure of docs/evidence/cost.md.
"""
from __future__ import annotations

import argparse
import functools
import json
import multiprocessing
import os
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / 'benchmarks')]
from detectors import CONFIGS, WAYS, settings  # noqa: E402

WARM = 2  # iterations that are not profiled
OPERATORS = "mmcv's operators"
STEP = 'optimizer'
PYTHON = 'Python'
# group -> parts of names of torch's operators; the first group that fits counts
GROUPS = {
    'convolutions': ('conv', ),
    'matrix products': ('aten::mm', 'addmm', 'bmm', 'attention'),
    'normalization': ('batch_norm', 'group_norm', 'layer_norm'),
    'other operators': ('', ),
}
ORDER = (*GROUPS, OPERATORS, STEP, PYTHON)
COLORS = ('#4c6a92', '#7fa3c7', '#b8cfe5', '#9a9a9a', '#e4572e', '#e9b44c', '#8fbf7f')


def group_of(event: Any) -> str:
    """Return the group of an operator that torch's profiler has recorded."""
    above = event
    while above is not None:
        if above.name == OPERATORS:
            return OPERATORS
        if above.name.startswith('Optimizer.step'):
            return STEP
        above = above.cpu_parent
    return next(group for group, parts in GROUPS.items()
                if any(part in event.name for part in parts))


def mark_operators() -> None:
    """Make the functions of ``mmcv._ext`` visible to the profiler."""
    import mmcv._ext as extension
    from torch.profiler import record_function

    def marked(function: Any) -> Any:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            with record_function(OPERATORS):
                return function(*args, **kwargs)
        return call

    for name, value in list(vars(extension).items()):
        if callable(value) and not name.startswith('_'):
            setattr(extension, name, marked(value))


def work(way: str, name: str, size: tuple[int, int], data_root: str, iterations: int,
         connection: Any) -> None:
    """Train, and send the milliseconds of an iteration by group."""
    import torch
    torch.set_num_threads(1)
    if way == 'mmrepro':
        import mmrepro  # noqa: F401
    from mmdet.utils import register_all_modules
    from mmengine.registry import LOOPS
    from mmengine.runner import IterBasedTrainLoop, Runner
    register_all_modules()
    found: Counter[str] = Counter()

    @LOOPS.register_module(name='TurnsTrainLoop')
    class ProfiledLoop(IterBasedTrainLoop):
        def run_iter(self, data_batch: Any) -> None:
            if self._iter < WARM:
                super().run_iter(data_batch)
                if self._iter == WARM:  # the run has chosen its operators
                    mark_operators()
                return
            cpu = [torch.profiler.ProfilerActivity.CPU]
            with torch.profiler.profile(activities=cpu) as profile:
                with torch.profiler.record_function(PYTHON):
                    super().run_iter(data_batch)
            for event in profile.events():
                group = PYTHON if event.name == PYTHON else group_of(event)
                found[group] += event.self_cpu_time_total / 1000 / iterations

    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        cfg = settings('train', name, *size, data_root, iterations + WARM)
        cfg.work_dir, cfg.log_level = folder, 'ERROR'
        cfg.randomness = dict(seed=1)
        if way == 'mmrepro':
            cfg.randomness.update(deterministic=True, numerics=dict(num_threads=1),
                                  self_checks=dict(steps=0, witness=False))
        Runner.from_cfg(cfg).train()
    connection.send({group: round(found[group], 1) for group in ORDER})


def measure(way: str, *task: Any) -> dict[str, float]:
    """Return the milliseconds of an iteration by group, from a fresh process."""
    context = multiprocessing.get_context('spawn')
    parent, child = context.Pipe()
    process = context.Process(target=work, args=(way, *task, child))
    process.start()
    child.close()
    try:
        result: dict[str, float] = parent.recv()
    finally:
        process.join()
    return result


def table(rows: dict[str, dict[str, dict[str, float]]]) -> str:
    """Return the groups of both ways as Markdown: percent of stock's iteration."""
    lines = ['| detector | ' + ' | '.join(ORDER) + ' | all |', '|---' * (len(ORDER) + 2) + '|']
    for name, ways in rows.items():
        whole = sum(ways['stock'].values()) / 100
        cells = [f'{ways["stock"][group] / whole:.0f} → {ways["mmrepro"][group] / whole:.0f}'
                 for group in ORDER]
        cells.append(f'100 → {sum(ways["mmrepro"].values()) / whole:.0f}')
        lines.append(f'| {name} | ' + ' | '.join(cells) + ' |')
    return '\n'.join(lines)


def draw(rows: dict[str, dict[str, dict[str, float]]], figure: Any, axis: Any) -> None:
    """Draw two bars for each detector, stock's above that of mmrepro; stock's is 100."""
    for number, ways in enumerate(rows.values()):
        whole = sum(ways['stock'].values()) / 100
        for way, below in zip(WAYS, (-.2, .2)):
            left = 0.
            for group, color in zip(ORDER, COLORS):
                width = ways[way][group] / whole
                axis.barh(number + below, width, .36, left, color=color,
                          label=group if (number, way) == (0, 'stock') else None)
                left += width
    axis.set_yticks(range(len(rows)), list(rows))
    axis.invert_yaxis()
    axis.set_xlabel("time of an iteration, stock's is 100: above stock, below mmrepro")
    figure.legend(loc='outside upper center', ncols=4)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('data_root', type=os.path.abspath, nargs='?')
    parser.add_argument('--models', nargs='+', choices=CONFIGS, default=list(CONFIGS))
    parser.add_argument('--size', default='320x224', help='width x height')
    parser.add_argument('--iterations', type=int, default=3, help='that are profiled')
    parser.add_argument('--out', type=Path, help='write JSON here')
    parser.add_argument('--draw', type=Path, metavar='FILE', help='what --out wrote')
    args = parser.parse_args()
    if args.draw:
        from dev import figures
        rows = json.loads(args.draw.read_text())['profiled']
        figures.save('detectors-profile', functools.partial(draw, rows), figsize=(9, 7))
        return
    if args.data_root is None:
        parser.error('DATA_ROOT or --draw FILE is needed')
    import torch

    from mmrepro.facts.collect import cpu_name
    rows: dict[str, dict[str, dict[str, float]]] = {}
    result = dict(cpu=cpu_name(), torch=torch.__version__, size=args.size, profiled=rows)
    width, height = map(int, args.size.split('x'))
    for name in args.models:
        rows[name] = {way: measure(way, name, (width, height), args.data_root, args.iterations)
                      for way in WAYS}
        print(f'{name}: {rows[name]}', file=sys.stderr, flush=True)
        if args.out:
            args.out.write_text(json.dumps(result, indent=1) + '\n')
    print(table(rows))


if __name__ == '__main__':
    main()
