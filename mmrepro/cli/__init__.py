"""The command ``mmrepro <verb>``."""
from __future__ import annotations

import difflib
import importlib
import os
import sys
from typing import Callable, NamedTuple, Optional, Sequence

from ..version import __version__

__all__ = ['VERBS', 'main', 'program_name']


class Verb(NamedTuple):
    """Where a verb lives. Its function takes the rest of the command line, returns an exit code."""
    module: str
    function: str
    summary: str

    def load(self) -> Callable[[Sequence[str]], int]:
        return getattr(importlib.import_module(self.module, __package__), self.function)


VERBS = {
    'demo': Verb('.demo', 'main', 'train twice on real photographs, compare every iteration'),
    'data': Verb('..demo.dataset', 'main', 'write the demonstration data set'),
    'train': Verb('..runs.start', 'train', 'train a detector'),
    'test': Verb('..runs.start', 'test', 'evaluate a detector'),
    'verify': Verb('..verify.variations', 'main',
                   'train in fresh processes, certify the same bits'),
    'replay': Verb('..verify.replay', 'main', 'train again from a manifest, compare as it goes'),
    'chaos': Verb('.chaos', 'main', 'kill a run at random moments, resume, compare'),
    'audit': Verb('.audit', 'main', 'look for what would make runs of a config differ'),
    'compare': Verb('.compare', 'main', 'where two runs part, and how it grows'),
    'localise': Verb('.localise', 'main', 'name the first thing that differs in two runs'),
    'seeds': Verb('.seeds', 'main', 'train several seeds: mean, spread, paired test'),
    'state': Verb('..verify.state_probe', 'main', 'name state that a config loses when it resumes'),
    'gpu_check': Verb('.gpu_check', 'main', 'does training repeat on this GPU, at what cost'),
    'ops': Verb('.ops', 'main', "list mmcv's operators: provider, deterministic, users"),
}


def usage() -> str:
    width = max(map(len, VERBS))
    verbs = '\n'.join(f'  {name:<{width}}  {verb.summary}' for name, verb in VERBS.items())
    return f'usage: mmrepro VERB ...   (mmrepro VERB --help)   mmrepro {__version__}\n\n{verbs}'


def program_name(verb: str) -> str:
    """What the usage of a verb calls the program: `mmrepro train`, or `train.py` for its tool."""
    started = os.path.basename(sys.argv[0])
    return started if started == f'{verb}.py' else f'mmrepro {verb}'


def main(argv: Optional[Sequence[str]] = None) -> int:
    """Run a verb and return its exit code: 0 done, 1 a verdict of "not equal", 2 wrong usage."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments and arguments[0] in ('-h', '--help', '--version'):
        print(__version__ if arguments[0] == '--version' else usage())
        return 0
    if not arguments:
        print(usage(), file=sys.stderr)
        return 2
    name, rest = arguments[0].replace('-', '_'), arguments[1:]
    if name not in VERBS:
        near = difflib.get_close_matches(name, VERBS, n=1)
        hint = f'did you mean {near[0]!r}?' if near else f'verbs: {", ".join(VERBS)}'
        print(f'mmrepro: unknown verb {arguments[0]!r}; {hint} (see mmrepro --help)',
              file=sys.stderr)
        return 2
    return VERBS[name].load()(rest)


if __name__ == '__main__':
    sys.exit(main())
