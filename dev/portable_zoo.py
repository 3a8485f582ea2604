"""Detectors of the zoo with ``cpu='portable'``, on this CPU and on emulated ones.

    python -m dev.portable_zoo [CONFIG ...]
    python -m dev.portable_zoo --python 'qemu-x86_64 -cpu Haswell-noTSX PYTHON' --as NAME [CONFIG]

Two steps with AdamW and an inference of each config, in a process of its own. Losses, weights and
predictions are compared as bits, and go to ``docs/results/portable.json``. On this CPU, the calls
of MKL are counted as well: none may be left.
"""
from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mmrepro.determinism import missing_at_start
from mmrepro.facts.collect import cpu_name
from mmrepro.ops.portable.table import REFUSED, REFUSED_SPARSE, ROUTED

from . import mkl_calls
from .children import printed_result
from .zoo.families import FAMILIES

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / 'docs' / 'results' / 'portable.json'
# the shortest that reach every kind of operator
CONFIGS = ('rtmdet/rtmdet_tiny_8xb32-300e_coco.py', 'retinanet/retinanet_r18_fpn_1x_coco.py')


def compute(config: str) -> dict[str, Any]:
    """Train a config in this process; return its digests, and the calls of MKL if counted."""
    import torch
    from mmdet.utils import register_all_modules

    from mmrepro import determinism, patches

    from .zoo import step
    register_all_modules(init_default_scope=True)
    patches.apply()
    member = next(member for member in FAMILIES if member.config == config)
    cfg = step.load(member.config, member.size)
    counter = mkl_calls.Counter() if mkl_calls.LIBRARY in os.environ else None
    with determinism.deterministic(cpu='portable', num_threads=1), step.one_rank(cfg):
        if counter is not None:
            counter.take()
        found = step.run_once(member, cfg, torch.optim.AdamW)
        calls = counter.take() if counter is not None else None
    return dict(losses=[{name: value.hex() for name, value in losses.items()}
                        for losses in found['losses']],
                weights=found['weights'][:16], output=found['output'][:16], calls=calls)


def start(config: str, python: Sequence[str], counter: str) -> subprocess.Popen:
    """Start a process that trains a config; ``counter`` is the library that counts, or ''."""
    env = {**os.environ, **missing_at_start({}, num_threads=1, cpu='portable'),
           'OMP_NUM_THREADS': '1', 'MKL_NUM_THREADS': '1', 'PYTHONPATH': str(ROOT)}
    if not counter:  # names of features that an emulated CPU may lack
        env.pop('NPY_DISABLE_CPU_FEATURES', None)
    return subprocess.Popen(
        [*python, '-W', 'ignore', '-m', 'dev.portable_zoo', '--one', config], text=True, cwd=ROOT,
        env=mkl_calls.environment(counter, env) if counter else env, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE)


def table(results: dict[str, dict[str, Any]]) -> str:
    """Return a Markdown table: a line per config, a column per CPU."""
    hosts = list(dict.fromkeys(host for row in results.values() for host in row))
    lines = [f'| config | weights | calls of MKL | {" | ".join(hosts)} |',
             f'|---|---|---|{"---|" * len(hosts)}']
    for config, row in sorted(results.items()):
        first = next(iter(row.values()))
        cells = ['' if host not in row else 'reference' if row[host] is first else 'different' if
                 any(row[host][key] != first[key] for key in ('losses', 'weights', 'output'))
                 else 'equal' for host in hosts]
        calls = sum(sum(found['calls'].values()) for found in row.values() if found['calls'])
        lines.append(f'| {config} | {first["weights"][:8]} | {calls} | {" | ".join(cells)} |')
    return '\n'.join(lines)


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
    parser.add_argument('--python', help='a command that runs Python on another CPU')
    parser.add_argument('--as', dest='name', help='what to call that CPU')
    parser.add_argument('--one', help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        print(json.dumps(compute(args.one)))
        return 0
    if bool(args.python) != bool(args.name):
        parser.error('--python and --as go together')
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    with tempfile.TemporaryDirectory() as folder:
        counter = '' if args.python else mkl_calls.build(folder)
        for config in args.configs or CONFIGS:
            python = shlex.split(args.python) if args.python else [sys.executable]
            found = printed_result(start(config, python, counter), limit=7200)  # emulators are slow
            host = args.name or cpu_name()
            results.setdefault(config, {})[host] = found
            print(config, host, found['weights'], found['calls'], flush=True)
            RESULTS.write_text(json.dumps(results, indent=1) + '\n')
    return int('different' in table(results))


if __name__ == '__main__':
    sys.exit(main())
