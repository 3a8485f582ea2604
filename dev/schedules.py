"""Trainings on virtual ranks under many seeded orders, in several processes.

    python dev/schedules.py --out docs/results/schedules.json --count 20000

``--out`` continues behind the schedules that a file has.
"""
from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

TESTS = Path(__file__).resolve().parents[1] / 'tests'
sys.path[:0] = [str(TESTS / name) for name in ('..', '.', 'support')]
from harness import run_all  # noqa: E402
from schedules import KINDS, run_many  # noqa: E402

AT_ONCE = 50


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--out', required=True)
    parser.add_argument('--count', type=int, default=20_000)
    parser.add_argument('--jobs', type=int, default=2)
    args = parser.parse_args()
    out = Path(args.out)
    total: dict[str, Any] = json.loads(out.read_text()) if out.exists() else dict(
        schedules=0, turns=0, seconds=0, kinds=dict.fromkeys(KINDS, 0), wrong=[])
    while total['schedules'] < args.count:
        begun, first = time.monotonic(), total['schedules']
        ranges = [range(start, min(start + AT_ONCE, args.count)) for start in range(
            first, min(first + AT_ONCE * args.jobs, args.count), AT_ONCE)]
        found = run_all({str(one): (run_many, (list(one), ), {}) for one in ranges}, args.jobs)
        for part in found.values():
            for key in ('schedules', 'turns', 'wrong'):
                total[key] += part[key]
            for kind, count in part['kinds'].items():
                total['kinds'][kind] += count
        total['seconds'] = round(total['seconds'] + time.monotonic() - begun)
        out.write_text(json.dumps(total, indent=1) + '\n')
        print(f'{total["schedules"]} schedules, {len(total["wrong"])} wrong', flush=True)
    return 1 if total['wrong'] else 0


if __name__ == '__main__':
    sys.exit(main())
