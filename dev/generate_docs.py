"""Regenerate the parts of the docs that show the code's own tables and measured figures.

    python dev/generate_docs.py            # write
    python dev/generate_docs.py --check    # name what is out of date, and exit with 1
"""
from __future__ import annotations

import argparse
import json
import os
import runpy
import sys
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# a checkout works without being installed, and is preferred to an installed mmrepro
if os.path.isfile(ROOT / 'mmrepro' / '__init__.py'):
    sys.path.insert(0, str(ROOT))

from dev import (  # noqa: E402
    causes_report,
    changes_report,
    command_line_report,
    kernel_table_report,
    layers,
    matrix,
    operator_report,
    portable_zoo,
    triton_kernels,
    virtual_ranks_report,
)
from dev.full_training import report as full_training  # noqa: E402
from dev.gpu_check import report as check_report  # noqa: E402
from dev.hosts import __main__ as hosts  # noqa: E402
from dev.libraries import __main__ as libraries  # noqa: E402
from dev.operator_check import GROUPS  # noqa: E402
from dev.versions import __main__ as versions  # noqa: E402
from dev.zoo import sweep_report  # noqa: E402
from mmrepro.report.report import Report  # noqa: E402

DOCS = ROOT / 'docs'


def result(name: str) -> dict:
    return json.loads((DOCS / 'results' / name).read_text())


def markdown(report: Report) -> str:
    """Return a report as a page."""
    lines = [f'# {report.title}', '', report.verdict, '', *(f'- {note}' for note in report.notes)]
    for table in report.tables:
        rows = [table.header, ['---'] * len(table.header), *table.rows]
        lines += ['', f'## {table.title}', '', *(f'| {" | ".join(cells)} |' for cells in rows)]
    return '\n'.join([*lines, ''])


# A page, or a part of one between two comments, the command that it names, and what makes it.
PARTS: tuple[tuple[str, str, Callable[[], str]], ...] = (
    ('results/operators.md', 'dev/operator_report.py',
     lambda: operator_report.as_markdown(sweep_report.reached_by(
         result('zoo_cpu.json')['rows']))),
    ('results/operators.md', 'python -m dev.kernel_table_report',
     lambda: '\n'.join(kernel_table_report.lines())),
    ('index.md', 'dev/command_line_report.py', command_line_report.verbs),
    ('reference/command-line.md', 'mmrepro/errors.py', command_line_report.exit_codes),
    ('explanation/architecture.md', 'dev/layers.py', layers.table),
    ('explanation/what-changes.md', 'dev/changes_report.py', changes_report.lines),
    ('results/replaced_parts.md', 'dev/causes_report.py', causes_report.entries),
    ('evidence/zoo.md', 'dev/zoo/__main__.py', lambda: sweep_report.needs(
        result('zoo_cpu.json')['rows'], result('zoo_packages.json')['rows'])),
    ('evidence/versions.md', 'bash tools/matrix.sh',
     lambda: matrix.table(result('matrix_cpu.json'))),
    ('evidence/versions.md', 'python -m dev.libraries',
     lambda: libraries.table(result('libraries_cpu.json'))),
    ('evidence/versions.md', 'python -m dev.versions', versions.table),
    ('evidence/full-training.md', 'python -m dev.full_training',
     lambda: full_training.table(result('full_training.json'))),
    ('evidence/hosts.md', 'python -m dev.hosts', lambda: hosts.table(result('hosts_cpu.json'))),
    ('evidence/hosts.md', 'python benchmarks/cpu_levels.py',
     lambda: runpy.run_path(str(ROOT / 'benchmarks' / 'cpu_levels.py'))['table'](
         result('cpu_levels_cpu.json'))),
    ('explanation/portable.md', 'python benchmarks/cpu_levels.py',
     lambda: runpy.run_path(str(ROOT / 'benchmarks' / 'cpu_levels.py'))['table'](
         result('cpu_levels_rtmdet_cpu.json'))),
    ('evidence/portable.md', 'dev/portable_zoo.py',
     lambda: portable_zoo.tables(result('portable.json'))),
    ('evidence/portable.md', 'mmrepro/ops/portable/table.py', portable_zoo.operators),
    ('evidence/gpu.md', 'python -m dev.triton_kernels',
     lambda: triton_kernels.table(result('triton_kernels.json'))),
    ('results/zoo_cpu.md', '', lambda: sweep_report.table(result('zoo_cpu.json'))),
    ('results/check_cpu_quick.md', '',
     lambda: markdown(check_report.report_of(result('check_cpu_quick.json'), GROUPS))),
    ('evidence/virtual-ranks.md', 'dev/virtual_ranks_matrix.py',
     lambda: virtual_ranks_report.table(result('virtual_ranks_matrix.json'))),
    ('evidence/virtual-ranks.md', 'dev/virtual_ranks_zoo.py',
     lambda: virtual_ranks_report.zoo_table(result('virtual_ranks_zoo.json'))),
    ('evidence/virtual-ranks.md', 'benchmarks/virtual_ranks.py',
     lambda: runpy.run_path(str(ROOT / 'benchmarks' / 'virtual_ranks.py'))['tables'](
         result('virtual_ranks_cpu.json'))),
    ('evidence/virtual-ranks.md', 'benchmarks/virtual_ranks_traffic.py',
     lambda: runpy.run_path(str(ROOT / 'benchmarks' / 'virtual_ranks_traffic.py'))['table'](
         result('virtual_ranks_traffic.json'))),
    ('evidence/virtual-ranks.md', 'benchmarks/sharded_memory.py',
     lambda: runpy.run_path(str(ROOT / 'benchmarks' / 'sharded_memory.py'))['table'](
         result('sharded_memory.json'))),
    ('evidence/cost.md', 'python benchmarks/detectors.py',
     lambda: runpy.run_path(str(ROOT / 'benchmarks' / 'detectors.py'))['table'](dict(measured={
         f'{column}, {cpu}': rows
         for cpu, name in (('AMD', 'detectors_cpu.json'), ('Intel', 'detectors_intel.json'))
         for column, rows in result(name)['measured'].items()}))),
    ('evidence/cost.md', 'python benchmarks/ops --page',
     lambda: runpy.run_path(str(ROOT / 'benchmarks' / 'ops' / 'page.py'))['page'](
         result('ops_cpu.json'))),
    ('evidence/cost.md', 'python benchmarks/ops --only nms',
     lambda: runpy.run_path(str(ROOT / 'benchmarks' / 'ops' / 'page.py'))['boxes'](
         result('ops_nms_cpu.json'))),
)


def replaced(text: str, maker: str, made: str) -> str:
    """Return the page ``text`` with ``made`` between the comments that name its maker.

    Raises:
        ValueError: the comments are not there.
    """
    begin, end = f'<!-- made by: {maker} -->', f'<!-- end of what {maker} made -->'
    before, found, rest = text.partition(begin)
    _, closed, after = rest.partition(end)
    if not found or not closed:
        raise ValueError(f'the page has no {begin if not found else end}')
    return f'{before}{begin}\n{made}\n{end}{after}'


def stale(write: bool) -> list[str]:
    """Return the pages that are out of date; with ``write``, update them."""
    found = []
    for name, maker, make in PARTS:
        path = DOCS / name
        text = path.read_text()
        new = replaced(text, maker, make()) if maker else make()
        if new != text:
            found.append(name)
            if write:
                path.write_text(new)
    return found


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split('\n')[0])
    parser.add_argument('--check', action='store_true', help='write nothing')
    args = parser.parse_args(argv)
    pages = stale(not args.check)
    for name in pages:
        path = os.path.normpath(os.path.join('docs', name))
        print(f'{path}: {"out of date" if args.check else "regenerated"}')
    return 1 if pages and args.check else 0


if __name__ == '__main__':
    sys.exit(main())
