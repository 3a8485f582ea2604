"""Run the rows one after the other; the table goes to ``docs/results/libraries_cpu.json``."""
from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from .. import matrix
from .rows import ALL, ROWS, LibraryRow, folder_name

RESULTS = os.path.join(matrix.ROOT, 'docs', 'results', 'libraries_cpu.json')


def on_top(python: str, packages: str, folder: str) -> None:
    """Install the packages of a row on top of its environment: wheels, without dependencies."""
    complete = Path(folder, 'complete')
    if not complete.exists() or complete.read_text() != packages:
        shutil.rmtree(folder, ignore_errors=True)
        subprocess.run([python, '-m', 'pip', 'install', '--quiet', '--no-deps', '--only-binary',
                        ':all:', '--target', folder, *packages.split()], check=True)
        complete.write_text(packages)


def run(name: str, row: LibraryRow, folder: str) -> dict[str, Any]:
    """Run a row; return its record."""
    record: dict[str, Any] = dict(name=name, config=row.config, environment=row.environment)
    extra = os.path.join(folder, folder_name(row.packages))
    runs = os.path.join(folder, 'run')
    try:
        python = matrix.make(matrix.ROWS[row.environment],
                             matrix.folder_of(row.environment, folder))
        if python is None:
            return {**record, 'error': f'no Python for {row.environment} on this machine'}
        on_top(python, row.packages, extra)
        env = {**os.environ, 'OMP_NUM_THREADS': '1', 'MKL_NUM_THREADS': '1',
               'CUBLAS_WORKSPACE_CONFIG': ':4096:8',  # else every process starts twice
               'PYTHONPATH': os.pathsep.join((extra, matrix.ROOT)), 'PYTHONWARNINGS': 'ignore'}
        done = subprocess.run([python, '-m', 'dev.libraries.suite', name, runs], env=env,
                              cwd=matrix.ROOT, stdout=subprocess.PIPE, text=True)
        if done.returncode or not done.stdout.strip():
            return {**record, 'error': f'the suite ended with exit code {done.returncode}'}
        return {**record, **json.loads(done.stdout.strip().splitlines()[-1])}
    except subprocess.CalledProcessError as error:
        return {**record, 'error': f'{" ".join(error.cmd[:4])} ended with {error.returncode}'}
    finally:
        shutil.rmtree(runs, ignore_errors=True)


def table(records: list[dict[str, Any]]) -> str:
    """Return a Markdown table with a line per row."""
    lines = ['| stock config | torch | mmcv-lite | MMDetection | bits | without the patch |',
             '|' + '---|' * 6]
    for one in records:
        steps = one.get('steps', {})
        cells = [one.get('versions', {}).get(key, '-') for key in ('torch', 'mmcv', 'mmdet')]
        cells += [matrix.outcome(steps), 'found by both' if matrix.GOOD >= {
            steps.get('without the patch'), steps.get('audit')} else '-']
        lines.append(f'| {one["name"]} | {" | ".join(cells)} |')
    return '\n'.join(lines)


def main(argv: list[str] | None = None) -> int:
    return matrix.run_rows(argv, argparse.ArgumentParser(prog='python -m dev.libraries'), ALL,
                           RESULTS, 'work_dirs/libraries',
                           lambda name, folder, keep: run(name, ROWS[name], folder), table)


if __name__ == '__main__':
    sys.exit(main())
