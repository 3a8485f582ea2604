"""Detectors of the zoo with ``cpu='portable'``, on this CPU and on emulated ones.

    python -m dev.portable_zoo [CONFIG ...]
    python -m dev.portable_zoo --trained [CONFIG ...]
    python -m dev.portable_zoo --python 'qemu-x86_64 -cpu Haswell-noTSX PYTHON' --as NAME [CONFIG]

Two steps with AdamW and an inference of each config. With ``--trained``, a training by the runner
instead, with the config's own pipelines, optimizer and hooks: 20 iterations, and once more from the
checkpoint of the tenth. Results are compared as bits between CPUs, and go to
``docs/results/portable.json``. On this CPU, the calls of MKL are counted as well: none may be left.

One process imports everything; each config is a forked child of it.
"""
from __future__ import annotations

import argparse
import gc
import json
import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Callable

from children import finished

from mmrepro.facts.collect import cpu_name
from mmrepro.ops.portable.table import REFUSED, REFUSED_SPARSE, ROUTED

from . import mkl_calls
from .zoo.families import FAMILIES

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / 'docs' / 'results' / 'portable.json'
STEPS, TRAINED = 'two steps', '20 iterations'
# the shortest that reach every kind of operator
CONFIGS = {STEPS: ('rtmdet/rtmdet_tiny_8xb32-300e_coco.py',
                   'retinanet/retinanet_r18_fpn_1x_coco.py'),
           TRAINED: ('rtmdet/rtmdet_tiny_8xb32-300e_coco.py', )}
ITERATIONS = 20
# some depend on the CPU that the process sees
VARIABLES = ('import json; from mmrepro.determinism import missing_at_start; '
             "print(json.dumps(missing_at_start({}, num_threads=1, cpu='portable')))")
LIMIT = 7200  # seconds for one config; emulators are slow


def compute(config: str) -> dict[str, Any]:
    """Train a config for two steps in this process; return its digests, and the calls of MKL."""
    import torch
    from mmdet.utils import register_all_modules

    from mmrepro import determinism, patches

    from .zoo import step
    register_all_modules(init_default_scope=True)
    patches.apply()
    member = next(member for member in FAMILIES if member.config == config)
    cfg = step.load(member.config, member.size)
    with determinism.deterministic(cpu='portable', num_threads=1), step.one_rank(cfg):
        _calls()
        found = step.run_once(member, cfg, torch.optim.AdamW)
        calls = _calls()
    return dict(losses=[{name: value.hex() for name, value in losses.items()}
                        for losses in found['losses']],
                weights=found['weights'][:16], output=found['output'][:16], calls=calls)


def train(config: str, data_root: str, folder: str) -> dict[str, Any]:
    """Run a training, and resume it from its middle.

    Returns:
        dict(runs: digests of batches, losses, gradients, weights, buffers, optimizer state and
        averages of all iterations, and of the metrics of validations, weights: the digest of those
        after the last iteration, resumed: where the resumed run first differs, or '').
    """
    from harness import digest
    from virtual_runs import run

    from .virtual_ranks_matrix import difference
    from .zoo.training import training
    widths = {row['config']: row['width'] for row in json.loads(
        (RESULTS.parent / 'zoo_trained.json').read_text())['rows'] if 'width' in row}
    member = next(member for member in FAMILIES if member.config == config)
    cfg = training(member, data_root, 1, widths[config], ITERATIONS)
    cfg.randomness.numerics = dict(cpu='portable', num_threads=1)
    expected = run(cfg, None, 1, Path(folder, 'whole'))
    assert sum('data' in line for line in expected[0]) == ITERATIONS
    found = run(cfg, None, 1, Path(folder, 'resumed'),
                Path(folder, 'whole', f'iter_{ITERATIONS // 2}.pth'))
    runs = {key: digest([line.get(key) for line in expected[0]])[:16]
            for key in (*expected[0][0], 'metrics') if key != 'iteration'}
    last = [line for line in expected[0] if 'data' in line][-1]
    return dict(runs=runs, weights=last['weights'][:16],
                resumed=difference(expected, found, ITERATIONS // 2), calls=None)


def attempt(function: Callable[..., dict[str, Any]], *args: Any) -> dict[str, Any]:
    """Return the result of a function, or the operator that mmrepro refuses."""
    from mmrepro.errors import DeterminismError
    try:
        return function(*args)
    except DeterminismError as error:
        if ' is refused with' not in str(error):
            raise
        return dict(weights='refused', refused=str(error).partition(' is refused')[0], calls=None)


_counter: Any = None


def _calls() -> dict[str, int] | None:
    """Return the calls of MKL since the last time; None where they are not counted."""
    global _counter
    if mkl_calls.LIBRARY not in os.environ:
        return None
    _counter = _counter or mkl_calls.Counter()
    return _counter.take()


def serve(kind: str, configs: Sequence[str], jobs: int) -> None:
    """Run configs in forked children, and print a line for each result."""
    import mmdet.datasets
    import mmdet.models  # noqa: F401  once, before the processes are forked
    with tempfile.TemporaryDirectory() as folder:
        if kind == STEPS:
            rows: dict[str, tuple] = {name: (attempt, (compute, name), {}) for name in configs}
        else:
            from mmrepro.demo.dataset import write_dataset

            from .zoo import training as zoo
            os.chdir(folder)
            data_root = 'data'  # batches hold the paths of their images
            write_dataset(data_root, num_train=2 * ITERATIONS, num_val=zoo.VAL_IMAGES)
            zoo.write_extras(data_root)
            rows = {name: (attempt, (train, name, data_root, str(Path(folder, str(number)))), {})
                    for number, name in enumerate(configs)}
        gc.freeze()
        for name, found in finished(rows, jobs, LIMIT):
            print(json.dumps([name, found]), flush=True)


def results_of(kind: str, configs: Sequence[str], python: Sequence[str], counter: str,
               jobs: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """Run configs with another Python; ``counter`` is the library that counts, or ''."""
    env = {**os.environ, 'OMP_NUM_THREADS': '1', 'MKL_NUM_THREADS': '1', 'PYTHONPATH': str(ROOT)}
    variables = subprocess.run([*python, '-W', 'ignore', '-c', VARIABLES], env=env, cwd=ROOT,
                               capture_output=True, text=True, check=True).stdout.splitlines()[-1]
    env.update(json.loads(variables))
    process = subprocess.Popen(
        [*python, '-W', 'ignore', '-m', 'dev.portable_zoo', '--serve', kind, '--jobs', str(jobs),
         *configs], text=True, cwd=ROOT, stdout=subprocess.PIPE,
        env=mkl_calls.environment(counter, env) if counter else env)
    assert process.stdout is not None
    for line in process.stdout:  # the output holds the log as well
        if line.startswith('["'):
            name, found = json.loads(line)
            yield name, found
    if process.wait():
        raise RuntimeError(f'the process ended with exit code {process.returncode}')


def _cell(found: dict[str, Any] | None, first: dict[str, Any]) -> str:
    if found is None:
        return ''
    if found is first:
        return 'reference'
    return 'equal' if outcome(found) == outcome(first) else 'different'


def table(results: dict[str, dict[str, Any]]) -> str:
    """Return a Markdown table: a line per config, a column per CPU."""
    hosts = list(dict.fromkeys(host for row in results.values() for host in row))
    lines = [f'| config | weights | {" | ".join(hosts)} |', f'|---|---|{"---|" * len(hosts)}']
    for config, row in sorted(results.items()):
        first = next(iter(row.values()))
        cells = [_cell(row.get(host), first) for host in hosts]
        lines.append(f'| {config} | {first["weights"][:8]} | {" | ".join(cells)} |')
    return '\n'.join(lines)


def tables(results: dict[str, Any]) -> str:
    """Return the tables of a file of results."""
    return '\n\n'.join(f'### {kind.capitalize()}\n\n{table(rows)}'
                       for kind, rows in results.items())


def outcome(found: dict[str, Any]) -> dict[str, Any]:
    """Return what has to be equal on two CPUs."""
    return {key: value for key, value in found.items() if key != 'calls'}


def operators() -> str:
    """Return a Markdown table of the operators that are replaced, and of those that are refused."""
    lines = ['| operator | instead of MKL |', '|---|---|']
    for row in ROUTED:
        lines.append(f'| `{row.operator}` | {row.why} |')
    lines += [f'| `{name}` | refused: {kind} |' for name, kind in REFUSED.items()]
    lines += [f'| `{name}`, CSR | refused: {kind} |' for name, kind in REFUSED_SPARSE.items()]
    return '\n'.join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('configs', nargs='*', help='of the zoo', metavar='CONFIG')
    parser.add_argument('--trained', action='store_true', help='20 iterations and a resume')
    parser.add_argument('--python', help='a command that runs Python on another CPU')
    parser.add_argument('--as', dest='name', help='what to call the CPU')
    parser.add_argument('--jobs', type=int, default=1, help='configs at the same time')
    parser.add_argument('--serve', choices=(STEPS, TRAINED), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        serve(args.serve, args.configs, args.jobs)
        return 0
    if args.python and not args.name:
        parser.error('--python asks for --as')
    kind = TRAINED if args.trained else STEPS
    host = args.name or cpu_name()
    python = shlex.split(args.python) if args.python else [sys.executable]
    with tempfile.TemporaryDirectory() as folder:
        counter = '' if args.python or args.trained else mkl_calls.build(folder)
        for config, found in results_of(kind, args.configs or CONFIGS[kind], python, counter,
                                        args.jobs):
            results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
            results.setdefault(kind, {}).setdefault(config, {})[host] = found
            RESULTS.write_text(json.dumps(results, indent=0) + '\n')
            same = len({json.dumps(outcome(one)) for one in results[kind][config].values()}) == 1
            print(config, host, found['weights'], found['calls'], found.get('resumed', ''),
                  'equal' if same else 'DIFFERENT', flush=True)
    return int(any('different' in table(rows) for rows in results.values()))


if __name__ == '__main__':
    sys.exit(main())
