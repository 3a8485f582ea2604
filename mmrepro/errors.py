"""The exceptions of mmrepro, in one tree, and the exit codes of its commands.

A command of mmrepro prints the message of an :class:`MMReproError`. Any other exception is a bug,
or an error of the training, and keeps its traceback. The second base of a class is the built-in
exception that it refines.
"""
from __future__ import annotations

import signal


class MMReproError(Exception):
    """Base class of all errors that mmrepro raises for its user."""


# ------------------------------------------------------------------------------------- settings

class RandomnessError(MMReproError, ValueError):
    """A value in ``randomness``, or a setting that contradicts it, is not allowed."""


class DeterminismError(MMReproError, ValueError):
    """A setting or an environment variable contradicts the requested determinism."""


class ConfigError(MMReproError, ValueError):
    """A config cannot be read, or an option does not fit it."""


class TooShortError(ConfigError):
    """A training has fewer iterations than were asked for; it has not begun."""


class MissingDataError(MMReproError, RuntimeError):
    """A file that the config reads is not on this disk."""


class DatasetError(MMReproError, RuntimeError):
    """A dataset cannot be built from its files; names the loader, the dataset and the file."""


class MissingPackageError(MMReproError, RuntimeError):
    """An optional package is not installed; the message says how to install it."""


# ----------------------------------------------------------------------------------- during a run

class TrainingError(MMReproError, RuntimeError):
    """A training ended with an error; commands exit with 1, not with 2 as for wrong settings."""


class SelfCheckError(TrainingError):
    """A self-check has found something; the message says everything."""


class _RaisedInWorkers(TrainingError):
    """Keeps its message when a worker has raised it.

    PyTorch raises the class again in the main process, with the traceback of the worker as the
    message; that traceback becomes the cause.
    """

    def __init__(self, message: str = '') -> None:
        _, _, raised = message.rpartition(f'{type(self).__module__}.{type(self).__qualname__}: ')
        in_worker = 'Original Traceback' in message
        super().__init__(raised.rstrip() if in_worker else message)
        if in_worker:
            self.__cause__ = RuntimeError(message)


class SampleDiffersError(_RaisedInWorkers, SelfCheckError):
    """A sample was loaded twice from one stream, with two results."""


class SampleError(_RaisedInWorkers):
    """A sample cannot be loaded; names dataset, index, file and transform.

    The exception of the dataset or transform is the cause.
    """


class StepDiffersError(SelfCheckError):
    """A step was repeated from the same state on the same batch, and its bits differ."""


class ValidationChangesError(SelfCheckError):
    """A validation has changed weights or settings that the training goes on with."""


class WitnessDiffersError(SelfCheckError):
    """A second process that repeats or resumes the run got different bits."""


class VirtualRanksError(TrainingError, NotImplementedError):
    """Code of the run cannot be run on virtual ranks."""


class UnknownOperatorError(TrainingError):
    """An operator ran that is not on the allow-list, and ``on_unknown='error'``."""


class OperatorProviderError(MMReproError, RuntimeError):
    """The requested provider of operators is unknown or not installed."""


class Preempted(SystemExit):
    """Ends the process with exit code ``PREEMPTED`` unless it is caught.

    Not an :class:`MMReproError`: like every ``SystemExit``, it passes ``except Exception``.

    Attributes:
        path: path of the checkpoint.
        iteration: number of finished iterations.
    """

    def __init__(self, code: int, path: str, iteration: int) -> None:
        super().__init__(code)
        self.path, self.iteration = path, iteration


# ---------------------------------------------------------------------------------------- ranks

class AgreementError(MMReproError, RuntimeError):
    """Ranks differ in a value that has to be equal."""


class ConnectionFailed(TrainingError):
    """The processes of a run cannot connect to each other; says which address is not reachable."""


class RankEnded(TrainingError):
    """A rank that others wait for has ended; names the rank and says how it ended."""


class Deadlock(TrainingError):
    """Virtual ranks wait for a rank that has ended, or for each other; says who waits where."""


class CollectiveMismatch(TrainingError):
    """Virtual ranks reached different collective operations; says which rank reached which."""


# -------------------------------------------------------------------------------- checkpoints, runs

class CheckpointError(MMReproError, RuntimeError):
    """A checkpoint is damaged, missing, or holds more than data."""


class MissingCheckpointError(CheckpointError, FileNotFoundError):
    """There is no such checkpoint."""


class WorkDirInUse(MMReproError, RuntimeError):
    """Another process trains in the work directory; says which, where, and since when."""


class ResumeError(MMReproError, RuntimeError):
    """The resuming run differs from the run that wrote the checkpoint."""


class FingerprintError(MMReproError, RuntimeError):
    """A file of a recorded run cannot be read; the message names file and line."""


class EmptyFingerprints(FingerprintError):
    """The files of a recorded run exist and are empty."""


class RunError(MMReproError, ValueError):
    """A path holds no run, or a file of the run cannot be read."""


# ---------------------------------------------------------------------------------------- verbs

class GoldenError(MMReproError, ValueError):
    """A config or file cannot be made into a golden; says which and why."""


class SeedsError(MMReproError, ValueError):
    """Arguments or results of ``seeds`` cannot be used."""


# ------------------------------------------------------------------------------------ exit codes

DONE, DIFFERENT, USAGE, NOTHING_TO_COMPARE = 0, 1, 2, 3
PREEMPTED = 75  # EX_TEMPFAIL of sysexits.h: try again later
INTERRUPTED = 130  # as shells report SIGINT: 128 + 2
READER_LEFT = 141  # as shells report SIGPIPE: 128 + 13

MEANINGS = {
    DONE: 'done; of a comparison: the same bits',
    DIFFERENT: 'a verdict of "not equal", or a training that failed',
    USAGE: 'wrong usage, or a setting that is not allowed',
    NOTHING_TO_COMPARE: 'nothing to compare: no common iteration, no golden for this machine',
    PREEMPTED: 'pre-empted, with a checkpoint; the same command with --resume continues',
    INTERRUPTED: 'interrupted by Ctrl-C (SIGINT)',
    READER_LEFT: 'the output is a pipe that was closed early',
}


def meaning(code: int) -> str:
    """Return the meaning of an exit code; a negative code is the number of a signal.

    >>> meaning(-9), meaning(-40)
    ('killed by SIGKILL', 'killed by signal 40')
    """
    if code < 0:
        names = {number.value: number.name for number in signal.Signals}
        return f'killed by {names.get(-code, f"signal {-code}")}'
    return MEANINGS.get(code, 'unknown')
