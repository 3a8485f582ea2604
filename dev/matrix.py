"""Train in environments with other versions: make one, run a short suite in it, remove it, next.

    bash tools/matrix.sh [--rows NAME ...] [--keep]

Needs nothing but Python and pip; nothing is compiled. torch's wheels for CUDA run on a CPU as well.
"""
from __future__ import annotations

import argparse
import glob
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any, Callable, NamedTuple

from .matrix_suite import ROOT, SUITES

RESULTS = os.path.join(ROOT, 'docs', 'results', 'matrix_cpu.json')
GOOD = frozenset(('same bits', 'found', 'named', 'done'))  # outcomes of a step


class Row(NamedTuple):
    """One environment.

    Attributes:
        python: its version.
        packages: what pip installs into it.
        suite: a key of :data:`dev.matrix_suite.SUITES`.
        sources: those of the packages that are published without wheels; they are pure Python.
    """
    python: str
    packages: str
    suite: str = 'detector'
    sources: str = ''

    @property
    def requirements(self) -> list[str]:
        """Return the arguments of pip."""
        more = [] if SUITES[self.suite].absent else ['pycocotools']
        sources = ['--no-binary', self.sources] if self.sources else []
        return ['--only-binary', ':all:', *sources, *self.packages.split(), 'setuptools<81',
                'scikit-image', 'rich', *more]


ROWS: dict[str, Row] = {
    'oldest': Row('3.9', 'torch==2.0.1 numpy==1.24.4 opencv-python==4.8.1.78 mmengine==0.10.0 '
                  'mmcv-lite==2.1.0 mmdet==3.3.0'),
    'torch 2.4': Row('3.10', 'torch==2.4.1 numpy==1.26.4 opencv-python==4.10.0.84 '
                     'mmengine==0.10.4 mmcv-lite==2.1.0 mmdet==3.3.0'),
    'torch 2.6': Row('3.12', 'torch==2.6.0 numpy==2.1.3 opencv-python==4.11.0.86 mmengine==0.10.7 '
                     'mmcv-lite==2.1.0 mmdet==3.3.0'),
    'locked': Row('3.11', 'torch==2.13.0 numpy==2.4.6 opencv-python==5.0.0.93 mmengine==0.10.7 '
                  'mmcv-lite==2.1.0 mmdet==3.3.0'),
    'newest': Row('3.13', 'torch numpy opencv-python mmengine==0.10.7 mmcv-lite==2.1.0 '
                  'mmdet==3.3.0'),
    'onedl forks': Row('3.11', 'torch==2.13.0 numpy==2.4.6 opencv-python==5.0.0.93 '
                       'onedl-mmengine==0.10.12 onedl-mmcv==2.3.6 onedl-mmdetection==3.5.1',
                       sources='onedl-mmcv,onedl-mmdetection'),
    'MMEngine alone': Row('3.11', 'torch==2.13.0 numpy==2.4.6 opencv-python==5.0.0.93 '
                          'mmengine==0.10.7', suite='classifier'),
}


def interpreter(version: str) -> str | None:
    """Return a Python of this version, from the path or from pyenv."""
    found = shutil.which(f'python{version}')
    of_pyenv = glob.glob(os.path.expanduser(f'~/.pyenv/versions/{version}.*/bin/python'))
    for path in filter(None, [found, *sorted(of_pyenv)]):
        done = subprocess.run([path, '-c', 'import sys, venv; print(*sys.version_info[:2])'],
                              capture_output=True, text=True)
        if done.stdout.split() == version.split('.'):
            return path
    return None


def make(row: Row, folder: str) -> str | None:
    """Install the environment of a row; return its Python, or None where there is none."""
    python = interpreter(row.python)
    if python is None:
        return None
    inside = os.path.join(folder, 'bin', 'python')
    if not os.path.exists(os.path.join(folder, 'complete')):
        shutil.rmtree(folder, ignore_errors=True)
        subprocess.run([python, '-m', 'venv', folder], check=True)
        subprocess.run([inside, '-m', 'pip', 'install', '--quiet', '--no-cache-dir',
                        '--disable-pip-version-check', *row.requirements], check=True)
        open(os.path.join(folder, 'complete'), 'w').close()
    return inside


def folder_of(name: str, folder: str) -> str:
    return os.path.join(folder, 'env-' + name.replace(' ', '-'))


def run(name: str, row: Row, folder: str, keep: bool) -> dict[str, Any]:
    """Run a row; return its record."""
    environment = folder_of(name, folder)
    started = time.monotonic()
    record: dict[str, Any] = dict(name=name, python=row.python, packages=row.packages)
    try:
        python = make(row, environment)
        if python is None:
            return {**record, 'error': f'no Python {row.python} on this machine'}
        env = {**os.environ, 'OMP_NUM_THREADS': '1', 'MKL_NUM_THREADS': '1',
               'PYTHONPATH': ROOT, 'PYTHONWARNINGS': 'ignore'}
        done = subprocess.run([python, '-m', 'dev.matrix_suite', row.suite,
                               os.path.join(folder, 'run')], env=env,
                              stdout=subprocess.PIPE, text=True)
        if not done.stdout.strip():
            return {**record, 'error': f'the suite ended with exit code {done.returncode}'}
        record.update(json.loads(done.stdout.strip().splitlines()[-1]))
    except subprocess.CalledProcessError as error:
        record['error'] = f'{" ".join(error.cmd[:4])} ... ended with exit code {error.returncode}'
    finally:
        shutil.rmtree(os.path.join(folder, 'run'), ignore_errors=True)
        if not keep:
            shutil.rmtree(environment, ignore_errors=True)
    return {**record, 'seconds': round(time.monotonic() - started)}


def outcome(steps: dict[str, str]) -> str:
    """Return 'equal' if all steps succeeded, else the steps that failed."""
    wrong = [f'{name}: {what.splitlines()[0][:60]}' for name, what in steps.items()
             if what not in GOOD]
    if wrong:
        return '; '.join(wrong)
    return 'equal' if steps else 'not run'


def table(records: list[dict[str, Any]]) -> str:
    """Return a Markdown table with a row per environment, for the page on versions."""
    names = ('python', 'torch', 'numpy', 'cv2', 'mmengine', 'mmcv', 'mmdet')
    lines = ['| environment | Python | torch | NumPy | OpenCV | MMEngine | mmcv | MMDetection '
             '| bits |', '|' + '---|' * 9]
    for one in records:
        versions = one.get('versions', {'python': one['python']})
        cells = [one['name'], *(versions.get(name, '-') for name in names),
                 outcome(one.get('steps', {}))]
        lines.append(f'| {" | ".join(cells)} |')
    return '\n'.join(lines)


def run_rows(argv: list[str] | None, parser: argparse.ArgumentParser, rows: Sequence[str],
             results: str, folder: str, run_row: Callable[[str, str, bool], dict[str, Any]],
             show: Callable[[list[dict[str, Any]]], str]) -> int:
    """Run the command line of a suite: row by row, and write each result at once.

    Args:
        rows: all names, in the order of the table.
        results: JSON file; rows that are not run stay in it.
        folder: for environments and runs.
        run_row: name, folder, whether to keep the environment -> the record of the row.
        show: the table of the records.

    Returns:
        1 if a row that was run is not 'equal', else 0.
    """
    parser.add_argument('--rows', nargs='+', choices=list(rows), default=list(rows))
    parser.add_argument('--folder', default=folder, help='for environments and runs')
    parser.add_argument('--out', default=results, help='JSON; rows that are not run stay')
    parser.add_argument('--keep', action='store_true', help='keep the environments')
    args = parser.parse_args(argv)
    folder = os.path.abspath(args.folder)
    os.makedirs(folder, exist_ok=True)
    records: dict[str, dict[str, Any]] = {}
    if os.path.exists(args.out):
        with open(args.out, encoding='utf-8') as file:
            records = {one['name']: one for one in json.load(file)}
    failed = False
    for name in args.rows:
        print(f'== {name}', flush=True)
        one = records[name] = run_row(name, folder, args.keep)
        failed |= outcome(one.get('steps', {})) != 'equal'
        print(json.dumps(one, indent=1), flush=True)
        with open(args.out, 'w', encoding='utf-8') as file:
            json.dump([records[row] for row in rows if row in records], file, indent=1)
            file.write('\n')
    # only what was made: the folder may have been there before
    for made in [] if args.keep else [*glob.glob(os.path.join(glob.escape(folder), 'env-*')),
                                      *glob.glob(os.path.join(glob.escape(folder), 'on-top-*'))]:
        shutil.rmtree(made)
    print(show([records[row] for row in rows if row in records]))
    return int(failed)


def main(argv: list[str] | None = None) -> int:
    return run_rows(argv, argparse.ArgumentParser(description=__doc__.splitlines()[0]), list(ROWS),
                    RESULTS, 'work_dirs/matrix',
                    lambda name, folder, keep: run(name, ROWS[name], folder, keep), table)


if __name__ == '__main__':
    sys.exit(main())
