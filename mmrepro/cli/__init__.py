"""The command ``mmrepro VERB``."""
from __future__ import annotations

import importlib
import io
import os
import sys
from collections.abc import Sequence
from typing import Callable

from ..errors import (
    DIFFERENT,
    DONE,
    INTERRUPTED,
    MEANINGS,
    READER_LEFT,
    USAGE,
    MMReproError,
    TrainingError,
)
from ..util.text import did_you_mean
from ..version import __version__

# verb -> summary. Each is a module of this package, with a function `main(argv) -> exit code`
VERBS = {
    'demo': 'train with mmrepro and without on real photographs, compare',
    'train': 'train a detector',
    'test': 'evaluate a detector',
    'audit': 'look for what would make runs of a config differ',
    'verify': 'train in fresh processes, certify the same bits; repeat and resume a run',
    'compare': 'show where two runs diverge and how the difference grows',
    'localise': 'name the first thing that differs in two runs',
    'replay': 'train again from a manifest, compare as it goes',
    'golden': 'keep the bits of a short run in the repository, check them',
    'seeds': 'train several seeds: mean, spread, paired test',
    'doctor': "check the environment, the packages and mmcv's operators",
}
# verbs that continue where they were interrupted
CONTINUED = {
    'train': '; the same command with --resume continues from the latest checkpoint, if one was '
             'written',
    'seeds': '; the same command continues',
}


def load(verb: str) -> Callable[..., int]:
    """Return the function of a verb: command line -> exit code."""
    main: Callable[..., int] = importlib.import_module(f'.{verb}', __package__).main
    return main


def usage() -> str:
    """Return the text of ``mmrepro --help``."""
    width = max(map(len, VERBS))
    verbs = '\n'.join(f'  {name:<{width}}  {summary}' for name, summary in VERBS.items())
    codes = '\n'.join(f'  {code:>3}  {text}' for code, text in MEANINGS.items())
    return (f'usage: mmrepro VERB ...   (mmrepro VERB --help)   mmrepro {__version__}\n\n{verbs}'
            f'\n\nexit codes:\n{codes}')


def program_name(verb: str) -> str:
    """Return the program in the usage of a verb: `mmrepro train`, or `train.py` for its tool.

    The name of a command that is no verb is returned as it is.
    """
    if verb not in VERBS:
        return verb
    started = os.path.basename(sys.argv[0])
    return started if started == f'{verb}.py' else f'mmrepro {verb}'


def run(verb: str, argv: Sequence[str] | None = None,
        main: Callable[..., int] | None = None) -> int:
    """Run a verb and return its exit code, see :mod:`mmrepro.errors`.

    An interrupt or an :class:`~mmrepro.errors.MMReproError` becomes a message. A report that is
    piped to ``head`` ends without a traceback. All other exceptions are bugs, or errors of the
    training.

    Args:
        verb: a verb, or the name that a command outside of the package has in messages.
        argv: the command line; None: that of this process.
        main: the function of the command; None: that of the verb.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):  # paths need not be text
        sys.stdout.reconfigure(errors='backslashreplace')
    try:
        code = (main or load(verb))(argv)
        sys.stdout.flush()
    except KeyboardInterrupt:
        print(f'\n{program_name(verb)}: interrupted{CONTINUED.get(verb, "")}', file=sys.stderr)
        return INTERRUPTED
    except MMReproError as error:
        print(f'{program_name(verb)}: {error}', file=sys.stderr)
        return DIFFERENT if isinstance(error, TrainingError) else USAGE
    except BrokenPipeError:
        if not _reader_has_left():
            raise  # the pipe to a worker process broke
        return READER_LEFT
    return code


def _reader_has_left() -> bool:
    """Whether the standard output is a pipe that nobody reads; it is discarded from then on."""
    try:
        sys.stdout.write('\n')
        sys.stdout.flush()
        return False
    except BrokenPipeError:
        # text that is left in the buffer would raise once more when Python ends
        with open(os.devnull, 'w') as nothing:
            os.dup2(nothing.fileno(), sys.stdout.fileno())
        return True


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments and arguments[0] in ('-h', '--help', '--version'):
        print(__version__ if arguments[0] == '--version' else usage())
        return DONE
    if not arguments:
        print(usage(), file=sys.stderr)
        return USAGE
    name, rest = arguments[0].replace('-', '_'), arguments[1:]
    if name not in VERBS:
        hint = did_you_mean(name, VERBS) or f'; verbs: {", ".join(VERBS)}'
        print(f'mmrepro: unknown verb {arguments[0]!r}{hint} (see mmrepro --help)',
              file=sys.stderr)
        return USAGE
    return run(name, rest)
