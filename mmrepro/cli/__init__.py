"""The command ``mmrepro <verb>``."""
from __future__ import annotations

import difflib
import importlib
import os
import sys
from collections.abc import Sequence
from typing import Any, Callable

from ..exit_codes import DONE, INTERRUPTED, MEANINGS, USAGE
from ..version import __version__

# verb -> summary. Each is a module of this package, with a function `main(argv) -> exit code`
VERBS = {
    'demo': 'train twice on real photographs, compare every iteration',
    'data': 'write the demonstration dataset',
    'train': 'train a detector',
    'test': 'evaluate a detector',
    'verify': 'train in fresh processes, certify the same bits',
    'replay': 'train again from a manifest, compare as it goes',
    'golden': 'keep the bits of a short run in the repository, check them',
    'chaos': 'kill a run at random moments, resume, compare',
    'audit': 'look for what would make runs of a config differ',
    'compare': 'where two runs diverge, and how it grows',
    'localise': 'name the first thing that differs in two runs',
    'seeds': 'train several seeds: mean, spread, paired test',
    'state': 'name state that a config loses when it resumes',
    'gpu_check': 'does training repeat on this GPU, at what cost',
    'ops': "list mmcv's operators: provider, deterministic, users",
}


def load(verb: str) -> Callable[..., int]:
    """The function of a verb: takes the rest of the command line, returns an exit code."""
    return importlib.import_module(f'.{verb}', __package__).main


# what goes on where it was interrupted
CONTINUED = {
    'train': '; the same command with --resume continues from the latest checkpoint',
    'seeds': '; the same command continues',
}


def run(verb: str, argv: Sequence[str] | None = None, *more: Any) -> int:
    """Run a verb and return its exit code; Ctrl-C is one line, also while it is imported.

    ``more`` are further arguments of the verb's function.
    """
    try:
        return load(verb)(argv, *more)
    except KeyboardInterrupt:
        print(f'\n{program_name(verb)}: interrupted{CONTINUED.get(verb, "")}', file=sys.stderr)
        return INTERRUPTED


def usage() -> str:
    width = max(map(len, VERBS))
    verbs = '\n'.join(f'  {name:<{width}}  {summary}' for name, summary in VERBS.items())
    codes = '\n'.join(f'  {code:>3}  {text}' for code, text in MEANINGS.items())
    return (f'usage: mmrepro VERB ...   (mmrepro VERB --help)   mmrepro {__version__}\n\n{verbs}'
            f'\n\nexit codes:\n{codes}')


def program_name(verb: str) -> str:
    """What the usage of a verb calls the program: `mmrepro train`, or `train.py` for its tool."""
    started = os.path.basename(sys.argv[0])
    return started if started == f'{verb}.py' else f'mmrepro {verb}'


def main(argv: Sequence[str] | None = None) -> int:
    """Run a verb and return its exit code, see :mod:`mmrepro.exit_codes`."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments and arguments[0] in ('-h', '--help', '--version'):
        print(__version__ if arguments[0] == '--version' else usage())
        return DONE
    if not arguments:
        print(usage(), file=sys.stderr)
        return USAGE
    name, rest = arguments[0].replace('-', '_'), arguments[1:]
    if name not in VERBS:
        near = difflib.get_close_matches(name, VERBS, n=1)
        hint = f'did you mean {near[0]!r}?' if near else f'verbs: {", ".join(VERBS)}'
        print(f'mmrepro: unknown verb {arguments[0]!r}; {hint} (see mmrepro --help)',
              file=sys.stderr)
        return USAGE
    return run(name, rest)
