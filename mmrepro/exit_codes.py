"""Exit codes of the command ``mmrepro`` and of trainings, in one table."""
from __future__ import annotations

import signal

DONE, DIFFERENT, USAGE, NOTHING_TO_COMPARE = 0, 1, 2, 3
PREEMPTED = 75  # EX_TEMPFAIL of sysexits.h: try again later
INTERRUPTED = 130  # what shells report of a program that ends by SIGINT: 128 + 2
READER_LEFT = 141  # what shells report of a program that ends by SIGPIPE: 128 + 13

MEANINGS = {
    DONE: 'done; of a comparison: the same bits',
    DIFFERENT: 'a verdict of "not equal", or an error',
    USAGE: 'wrong usage, or a setting that is not allowed',
    NOTHING_TO_COMPARE: 'no golden for this machine',
    PREEMPTED: 'pre-empted, with a checkpoint; the same command with --resume continues',
    INTERRUPTED: 'interrupted by Ctrl-C (SIGINT)',
    READER_LEFT: 'the program that reads the output ended first',
}


def meaning(code: int) -> str:
    """What an exit code says; a negative one is the number of the signal that ended the process.

    >>> meaning(-9)
    'killed by SIGKILL'
    """
    if code < 0:
        return f'killed by {signal.Signals(-code).name}'
    return MEANINGS.get(code, 'unknown')
