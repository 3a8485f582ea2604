"""The exit codes of the command ``mmrepro`` and of trainings, in one table."""
from __future__ import annotations

import signal

DONE, DIFFERENT, USAGE, NOTHING_TO_COMPARE, NOT_VERIFIED = 0, 1, 2, 3, 4
PREEMPTED = 75  # EX_TEMPFAIL of sysexits.h: try again later
INTERRUPTED = 130  # as shells report SIGINT: 128 + 2
READER_LEFT = 141  # as shells report SIGPIPE: 128 + 13

MEANINGS = {
    DONE: 'done; of a comparison: the same bits',
    DIFFERENT: 'a verdict of "not equal", or a training that failed',
    USAGE: 'wrong usage, or a setting that is not allowed',
    NOTHING_TO_COMPARE: 'nothing to compare: no common iteration, no golden for this machine',
    NOT_VERIFIED: 'not verified: all bits agree, but so do those of a run spoiled on purpose',
    PREEMPTED: 'pre-empted, with a checkpoint; the same command with --resume continues',
    INTERRUPTED: 'interrupted by Ctrl-C (SIGINT)',
    READER_LEFT: 'the output is a pipe that was closed early',
}


def meaning(code: int) -> str:
    """Return what an exit code says; a negative code is the number of a signal.

    >>> meaning(-9), meaning(-40)
    ('killed by SIGKILL', 'killed by signal 40')
    """
    if code < 0:
        names = {number.value: number.name for number in signal.Signals}
        return f'killed by {names.get(-code, f"signal {-code}")}'
    return MEANINGS.get(code, 'unknown')
