"""Train every set-up, and write docs/evidence/user-setups.md.

    python -m dev.user_setups [--only NAME ... | --rest] [--jobs N]

``--only`` trains some again, and keeps the outcomes of the others; ``--rest`` trains those that
have no outcome yet, in an order that has nothing to do with what they are.
"""
from __future__ import annotations

import argparse
import importlib
import json
import sys
from hashlib import sha256
from pathlib import Path

import harness  # imports what is slow, once
import one_thread  # noqa: F401  before torch

# isort: split

from .report import write
from .setup import GOOD, SETUPS, Outcome, judge

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / 'docs' / 'evidence' / 'user-setups.md'
RESULTS = ROOT / 'docs' / 'results' / 'user_setups.json'
FAMILIES = ('samples', 'loading', 'steps', 'chance', 'optimization', 'hooks', 'reshaping',
            'validations', 'resumes', 'virtual_ranks', 'settings', 'averages', 'kept',
            'set_by_hooks', 'stores', 'moments', 'recipes', 'programs', 'techniques',
            'surroundings', 'datasets', 'modules_and_loops')


def load() -> None:
    """Import the modules that register set-ups."""
    for name in FAMILIES:
        importlib.import_module(f'.{name}', __package__)


def main() -> int:
    load()
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    chosen = parser.add_mutually_exclusive_group()
    chosen.add_argument('--only', nargs='+', choices=sorted(SETUPS), metavar='NAME')
    chosen.add_argument('--rest', action='store_true')
    parser.add_argument('--jobs', type=int, default=2)
    args = parser.parse_args()
    known = json.loads(RESULTS.read_text()) if args.only or args.rest else {}
    names = args.only or list(SETUPS)
    if args.rest:
        names = sorted(set(SETUPS) - set(known), key=lambda name: sha256(name.encode()).digest())
    outcomes = {name: Outcome(*known[name]) for name in SETUPS if name in known}
    for first in range(0, len(names), args.jobs):
        part = {name: (judge, (name, ), {}) for name in names[first:first + args.jobs]}
        for name, outcome in harness.run_all(part, args.jobs).items():
            outcomes[name] = outcome
            print(f'{name:40s} {outcome.outcome:12s} {outcome.where:30s} {outcome.says[:150]}',
                  flush=True)
        ordered = {name: outcomes[name] for name in SETUPS if name in outcomes}
        RESULTS.write_text(json.dumps(ordered, indent=0) + '\n')
        PAGE.write_text(write(ordered), encoding='utf-8')
    return 1 if any(outcome.outcome not in GOOD for outcome in outcomes.values()) else 0


if __name__ == '__main__':
    sys.exit(main())
