"""Print the report of a verb, or write it as JSON."""
from __future__ import annotations

import argparse

from ..report.report import Report
from ..report.terminal import show


def finish(report: Report, args: argparse.Namespace, everything: bool = False) -> int:
    """Print a report, or write it as ``--json`` asks; returns its exit code."""
    if args.json != '-':
        show(report, everything)
    write_json(report.json(), args.json)
    return report.exit_code


def write_json(text: str, target: str | None) -> None:
    """Write to the file that ``--json`` names; '-' is the standard output, None nowhere."""
    if target == '-':
        print(text)
    elif target is not None:
        with open(target, 'w', encoding='utf-8') as file:
            file.write(f'{text}\n')
