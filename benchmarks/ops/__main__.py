"""Operators in PyTorch against mmcv's compiled ones: time and memory, side by side in one run.

    python benchmarks/ops --out ops.json             # sizes of R50-FPN at 800 x 1333
    python benchmarks/ops --quick --only roi_align   # an eighth of the size, a few seconds
    python benchmarks/ops --page ops.json            # the tables of docs/evidence/cost.md

Both forms of a case run alternately and the least time of each counts, so other load on the
machine affects both alike; with one thread it is processor time. The ratio (ours / theirs, below
1 is faster) is what to compare. Memory is measured in a forked child: the peak of the resident set
over what it was with the inputs made, less the outputs; as a multiple of the inputs' and outputs'
own size. What mmcv's Python allocates around a kernel (buffers, argmax) counts as extra for both.
Without a compiled mmcv, or a kernel of it for the CPU, the ratio stays empty or is to what is
named.
"""
from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

# the catalogue of cases is in the checkout, which is preferred to an installed mmrepro
ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / 'tests' / 'support')]

import boxes  # noqa: E402
import features  # noqa: E402
import torch  # noqa: E402
from measure import machine  # noqa: E402
from page import BOX_HEAD, HEAD, box_row, page, row  # noqa: E402

import mmrepro  # noqa: E402, F401  gives mmcv-lite its operators

# Table, its heading, what makes its rows, how a row is printed, what names a row.
TABLES = (('features', HEAD, features.measured, row, ('case',)),
          ('boxes', BOX_HEAD, boxes.measured, box_row, ('operator', 'size')))


def merged(known: list[dict], found: list[dict], names: tuple[str, ...]) -> list[dict]:
    """``known`` with the rows of ``found`` in place of those of the same name, or behind them."""
    rows = {tuple(entry[name] for name in names): entry for entry in (*known, *found)}
    return list(rows.values())


def known(path: Path | None, head: dict[str, Any]) -> dict[str, Any]:
    """Return what the file holds; SystemExit if it is of another machine, version or size."""
    if path is None or not path.exists():
        return {}
    report = json.loads(path.read_text())
    for key, value in head.items():
        if report.get(key) != value:
            raise SystemExit(f'{path}: {key!r} is {report.get(key)}, of this run {value}; '
                             'figures of both do not belong into one file: name another')
    return report


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split('\n')[0])
    parser.add_argument('--only', default='', help='regular expression of cases')
    parser.add_argument('--quick', action='store_true', help='small sizes of feature maps')
    parser.add_argument('--repeats', type=int, default=7)
    parser.add_argument('--seconds', type=float, default=8., help='per case, after two repetitions')
    parser.add_argument('--threads', type=int, default=1, help='memory is measured with one only')
    parser.add_argument('--out', type=Path, help='JSON; other rows that it holds stay')
    parser.add_argument('--page', type=Path, metavar='FILE', help='print the tables of this JSON')
    args = parser.parse_args(argv)
    if args.page:
        print(page(json.loads(args.page.read_text())))
        return 0
    torch.set_num_threads(args.threads)
    report: dict[str, Any] = {'machine': machine(args.threads), 'quick': args.quick}
    before = known(args.out, report)
    print(report['machine'])
    for table, heading, measured, line, names in TABLES:
        print(f'\n{heading}', flush=True)
        found = []
        for entry in measured(args.only, args.quick, args.repeats, args.seconds):
            found.append(entry)
            print(line(entry), flush=True)
        report[table] = merged(before.get(table, []), found, names)
    if args.out:
        args.out.write_text(json.dumps(report, indent=1) + '\n')
    return 0


if __name__ == '__main__':
    sys.exit(main())
