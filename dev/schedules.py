"""Trainings on virtual ranks under many seeded orders, in several processes.

    python -m dev.schedules --out docs/results/schedules.json --count 20000
    python -m dev.schedules --replay 17

``--out`` goes on with those that a file does not have.
"""
from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from children import finished
from schedules import KINDS, run_many

AT_ONCE = 50
LIMIT = 3600  # seconds for these, beside other work


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--out', default='schedules.json')
    parser.add_argument('--replay', type=int, metavar='NUMBER')
    parser.add_argument('--count', type=int, default=20_000)
    parser.add_argument('--jobs', type=int, default=2)
    args = parser.parse_args()
    if args.replay is not None:
        found = run_many([args.replay])
        print(*found.pop('wrong'), found, sep='\n')
        return 0
    out = Path(args.out)
    total: dict[str, Any] = json.loads(out.read_text()) if out.exists() else dict(
        schedules=0, turns=0, kinds=dict.fromkeys(KINDS, 0), wrong=[], ranges=[])
    done = {start for first, last in total['ranges'] for start in range(first, last, AT_ONCE)}
    jobs = {str(start): (run_many, (list(range(start, start + AT_ONCE)), ), {})
            for start in range(0, args.count, AT_ONCE) if start not in done}
    for name, found in finished(jobs, args.jobs, LIMIT):
        done.add(int(name))
        for key in ('schedules', 'turns', 'wrong'):
            total[key] += found[key]
        for kind, count in found['kinds'].items():
            total['kinds'][kind] += count
        total['ranges'] = [[start, end] for start, end in zip(
            sorted(start for start in done if start - AT_ONCE not in done),
            sorted(start + AT_ONCE for start in done if start + AT_ONCE not in done))]
        out.write_text(json.dumps(total, indent=1) + '\n')
        print(f'{total["schedules"]} schedules, {len(total["wrong"])} wrong', flush=True)
    return 1 if total['wrong'] else 0


if __name__ == '__main__':
    sys.exit(main())
