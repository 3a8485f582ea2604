"""How a verb ends: exit codes of errors, the printed report."""
from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..errors import MMReproError, TrainingError
from ..exit_codes import DIFFERENT, DONE, INTERRUPTED, READER_LEFT, USAGE
from . import program_name

if TYPE_CHECKING:
    from ..report.model import Report

# what goes on where it was interrupted
CONTINUED = {
    'train': '; the same command with --resume continues from the latest checkpoint',
    'seeds': '; the same command continues',
}


@dataclass
class Outcome:
    """The exit code of a verb."""
    code: int = DONE


@contextmanager
def exit_code_of(verb: str) -> Iterator[Outcome]:
    """Turn errors of a verb into messages and an exit code."""
    outcome = Outcome()
    try:
        yield outcome
        sys.stdout.flush()
    except KeyboardInterrupt:
        print(f'\n{program_name(verb)}: interrupted{CONTINUED.get(verb, "")}', file=sys.stderr)
        outcome.code = INTERRUPTED
    except MMReproError as error:
        print(f'{program_name(verb)}: {error}', file=sys.stderr)
        outcome.code = DIFFERENT if isinstance(error, TrainingError) else USAGE
    except BrokenPipeError:
        if not _reader_has_left():
            raise  # the pipe to a worker process broke
        outcome.code = READER_LEFT


def _reader_has_left() -> bool:
    """Whether the standard output is a pipe that nobody reads; it is discarded from then on."""
    try:
        sys.stdout.write('\n')
        sys.stdout.flush()
        return False
    except BrokenPipeError:
        # what is left in the buffer would raise once more when Python ends
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return True


def finish(report: Report, args: argparse.Namespace, everything: bool = False) -> int:
    """Print a report, or write it as ``--json`` asks; returns its exit code."""
    from ..report.terminal import show
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
