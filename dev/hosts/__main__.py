"""Compare the batches of several hosts; the table goes to ``docs/results/hosts_cpu.json``.

    python -m dev.hosts                                    hosts that variables emulate
    python -m dev.hosts --python 'COMMAND' --as NAME       one more: any command that runs Python on
                                                           another CPU, an emulator for example

The first form writes the file, the second adds a row to it. Every host is a process of its own.
"""
from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from children import printed_result

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / 'docs' / 'results' / 'hosts_cpu.json'
TRAIN_IMAGES, VAL_IMAGES = 12, 2


def write_data(root: str) -> str:
    """Write the demonstration dataset, every other photograph as JPEG; return its digest."""
    import cv2

    from mmrepro.demo.dataset import data_digest, write_dataset
    write_dataset(root, num_train=TRAIN_IMAGES, num_val=VAL_IMAGES)
    for path in sorted(Path(root, 'train2017').iterdir())[::2]:
        # readers go by the content, not by the name
        path.write_bytes(cv2.imencode('.jpg', cv2.imread(str(path)))[1].tobytes())
    return data_digest(root)


def start(root: str, variables: Mapping[str, str], python: Sequence[str] = (sys.executable, ),
          only: Sequence[str] = ()) -> subprocess.Popen:
    """Start a process that computes the batches, ``only`` those of some pipelines, on a host."""
    from .emulated import hosts
    own = {name for host in hosts().values() for name in host.variables}
    env = {name: value for name, value in os.environ.items() if name not in own}
    env.update(OMP_NUM_THREADS='1', MKL_NUM_THREADS='1', PYTHONHASHSEED='0')
    # batches hold paths of images: they begin with '.', wherever the dataset is
    return subprocess.Popen([*python, '-W', 'ignore', str(ROOT / 'dev/hosts/batches.py'), '.',
                             *only],
                            env={**env, **variables}, cwd=root, text=True,
                            stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def differing(found: Mapping[str, list[str]], expected: Mapping[str, list[str]]) -> list[str]:
    """Return the pipelines that both have and whose batches differ."""
    return [name for name in expected if name in found and found[name] != expected[name]]


def row(name: str, one: Mapping[str, Any], expected: Mapping[str, list[str]], promised: bool
        ) -> dict[str, Any]:
    return dict(host=name, promised=promised, pipelines=len(set(one['digests']) & set(expected)),
                differs=differing(one['digests'], expected),
                instructions=one['instructions'], torch=one['versions']['torch'])


def table(content: Mapping[str, Any]) -> str:
    """Return a Markdown table with a line per host."""
    lines = ['| host | promised | different batches |', '|---|---|---|']
    for one in content['hosts']:
        differs, count = one['differs'], one['pipelines']
        text = f'all {count} pipelines' if len(differs) == count else \
            ', '.join(differs) or f'none of {count} pipelines'
        lines.append(f'| {one["host"]} | {"the same" if one["promised"] else "-"} | {text} |')
    return '\n'.join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('--python', help='a command that runs Python on another CPU')
    parser.add_argument('--as', dest='name', help='what to call that CPU')
    parser.add_argument('--out', default=str(RESULTS))
    args = parser.parse_args()
    if bool(args.python) != bool(args.name):
        parser.error('--python and --as go together')
    from .emulated import hosts
    with tempfile.TemporaryDirectory() as root:
        data = write_data(root)
        if args.python:
            content = json.loads(Path(args.out).read_text())
            if content['data'] != data:
                parser.error(f'{args.out} is about other images; run without --python first')
            one = printed_result(start(root, {}, shlex.split(args.python)))
            content['hosts'] = [*(old for old in content['hosts'] if old['host'] != args.name),
                                row(args.name, one, content['digests'],
                                    one['instructions'].startswith('AVX'))]
        else:
            found = {name: printed_result(start(root, host.variables))
                     for name, host in hosts().items()}
            here = found['this CPU']
            content = dict(data=data, **{key: here[key] for key in (
                'cpu', 'features', 'versions', 'digests')})
            content['hosts'] = [row(name, found[name], here['digests'], host.promised)
                                for name, host in hosts().items()]
    Path(args.out).write_text(json.dumps(content, indent=1) + '\n')
    print(table(content))
    return int(any(one['promised'] and one['differs'] for one in content['hosts']))


if __name__ == '__main__':
    sys.exit(main())
