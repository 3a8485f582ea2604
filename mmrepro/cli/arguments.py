"""Options that mean the same in several verbs, errors in a line, and the output of a report."""
from __future__ import annotations

import argparse
import math
import os
import re
import textwrap
from typing import Any, Callable, NoReturn

from mmengine.config import Config, DictAction

from ..config import with_virtual_ranks
from ..errors import USAGE, ConfigError, MMReproError
from ..report.report import Report
from ..runs.config_files import ADD, config_of, import_modules, setting, without_mark
from ..runs.startup import build_runner, on_ranks, restart_for
from ..util.scoped import replaced
from ..util.text import not_a
from . import program_name

DEMO_DATA = os.path.join('data', 'demo')


def at_least(low: int, high: int | None = None, kind: type = int) -> Callable[[str], Any]:
    """Return the parser of a number from ``low`` to ``high``; None: without an upper limit."""
    allowed = f'{low} or more' if high is None else f'{low} to {high}'

    def number(text: str) -> Any:
        if not low <= kind(text) <= (math.inf if high is None else high):
            raise argparse.ArgumentTypeError(f'{text}: must be {allowed}')
        return kind(text)

    number.__name__ = kind.__name__  # in argparse's message about what is no number
    return number


class Options(DictAction):  # type: ignore[misc]
    """MMEngine's ``--cfg-options``; refuses what is not ``KEY=VALUE``.

    Keeps the words as well, as ``options_as_given``, for processes that are started.
    """

    def __call__(self, parser: Any, namespace: Any, values: Any, option: Any = None) -> None:
        for text in values:
            try:
                setting(text)
            except ConfigError as error:
                raise argparse.ArgumentError(self, str(error)) from error
        namespace.options_as_given = (*namespace.options_as_given, *values)
        super().__call__(parser, namespace, list(values), option)


# name -> arguments of `add_argument`; the help of those with a default ends with it
SHARED: dict[str, dict[str, Any]] = {
    'json': dict(nargs='?', const='-', metavar='FILE',
                 help='write the outcome as JSON to FILE; - or no FILE is the standard output'),
    'iters': dict(type=at_least(1), metavar='N', help='iterations of each run'),
    'ranks': dict(type=at_least(1), metavar='N', help='ranks of each run, a process each'),
    'virtual_ranks': dict(type=at_least(2), metavar='V', help='virtual ranks of each run, on any '
                          'number of processes, with the same bits'),
    'work_dir': dict(metavar='DIR', help='where the runs write'),
    'demo_data': dict(nargs='?', const=DEMO_DATA, metavar='DIR',
                      help=f'train on the demonstration dataset, written to DIR ({DEMO_DATA})'),
    'level': dict(choices=('step', 'parameter', 'module'), help='how much the fingerprints say'),
    'full': dict(action='store_true',
                 help='images, batch and weights as in the config (default: small)'),
    'cfg_options': dict(nargs='+', action=Options, metavar='KEY=VALUE',
                        help=f'change settings of the config; {ADD}KEY=VALUE adds a key that '
                        'resembles another'),
}


def shared(title: str = '', **defaults: Any) -> argparse.ArgumentParser:
    """Return a parent parser with options of :data:`SHARED`, with these defaults, in a group."""
    parent = argparse.ArgumentParser(add_help=False)
    group = parent.add_argument_group(title) if title else parent
    for name, default in defaults.items():
        given = dict(SHARED[name], default=default)
        if default not in (None, False):
            given['help'] += ' (default: %(default)s)'
        group.add_argument(f'--{name.replace("_", "-")}', **given)
    if 'cfg_options' in defaults:
        parent.set_defaults(options_as_given=())
    return parent


class Parser(argparse.ArgumentParser):
    """Prints an error in one line and exits with code 2; the usage is in ``--help``."""
    _parsing = False

    def __init__(self, verb: str, description: str, epilog: str,
                 *parents: argparse.ArgumentParser) -> None:
        super().__init__(prog=program_name(verb), epilog=epilog, parents=parents,
                         description=textwrap.fill(description, 80, break_on_hyphens=False),
                         formatter_class=argparse.RawDescriptionHelpFormatter)

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        with replaced(self, _parsing=True):
            # options may stand between paths, the last of which may be left out
            parsed = self.parse_intermixed_args(args, namespace)
        path = getattr(parsed, 'json', None)
        if path not in (None, '-'):
            if os.path.isdir(path) or os.path.isfile(path) and not path.endswith('.json'):
                self.error(f'--json {path}: exists, and is not a .json file; it is not overwritten')
            self.make_folder_of(path, '--json')
        return parsed

    def error(self, message: str) -> NoReturn:
        hint = f' (see {self.prog} --help)' if self._parsing else ''
        message = re.sub(r'^argument (\S+): (?=\S+: must be)', r'\1 ', message)
        self.exit(USAGE, f'{self.prog}: {message}{hint}\n')

    def refuse(self, args: argparse.Namespace, why: str, *names: str) -> None:
        """Refuse options that were given and have no meaning here."""
        for name in names:
            if getattr(args, name) != self.get_default(name):
                self.error(f'--{name.replace("_", "-")} {why}')

    def processes(self, text: str, ranks: int | None) -> list[int]:
        """Parse ``4,2,1``, numbers of processes that share ``ranks`` ranks; None: any number."""
        words = [word.strip() for word in text.split(',')]
        if not all(word.isdecimal() and 1 <= int(word) <= (ranks or int(word)) for word in words):
            allowed = f'from 1 to {ranks}, the number of ranks' if ranks else 'of 1 or more'
            self.error(f'--processes {text}: must be numbers {allowed}, with commas between them')
        return [int(word) for word in words]

    def make_folder(self, path: str, option: str = '--work-dir') -> str:
        """Make the folder that an option names, unless it exists; returns ``path``."""
        if '://' in path:  # a local folder would get this name
            self.error(f'{option} {path}: must be a folder of this machine; checkpoints go to '
                       'remote storage with default_hooks.checkpoint.out_dir')
        try:
            os.makedirs(path, exist_ok=True)
        except OSError as error:
            self.error(f'{option} {path}: cannot be made: {error.strerror}')
        if not os.access(path, os.W_OK):
            self.error(f'{option} {path}: cannot be written to')
        return path

    def make_folder_of(self, path: str, option: str) -> None:
        """Make the folder of the file that an option names, unless it exists."""
        self.make_folder(os.path.dirname(path) or '.', f'{option} {path}: the folder')


def existing_checkpoint(path: str, what: str = 'checkpoint') -> str:
    """Refuse a path that is no file; returns it. An address is not checked."""
    if '://' not in path and not os.path.isfile(path):
        raise ConfigError(not_a(what, path))
    return path


def finish(report: Report, args: argparse.Namespace, everything: bool = False) -> int:
    """Print a report, or write it as ``--json`` asks; returns its exit code."""
    if args.json == '-':
        print(report.json())
        return report.exit_code
    report.show(everything)
    for path in report.data.get('written', {}).values():
        print(f'wrote {path}')
    if args.json is not None:
        with open(args.json, 'w', encoding='utf-8') as file:
            file.write(f'{report.json()}\n')
    return report.exit_code


# arguments that set the key of `randomness` of the same name
RANDOMNESS_ARGUMENTS = ('seed', 'deterministic', 'diff_rank_seed', 'virtual_ranks')


def training_parser(verb: str, description: str, checkpoint: bool = False) -> Parser:
    """Return the parser of ``train`` or, with a ``checkpoint``, of ``test``."""
    example = 'CONFIG CHECKPOINT' if checkpoint else 'CONFIG'
    parser = Parser(verb, description, f'example:\n  %(prog)s {example} --seed 42 --deterministic '
                    '--cfg-options train_dataloader.num_workers=4', shared(cfg_options=None))
    parser.add_argument('config', help='path of a config, or package::path')
    if checkpoint:
        parser.add_argument('checkpoint', help='path of the checkpoint')
    parser.add_argument('--work-dir', metavar='DIR',
                        help="where logs and checkpoints go (default: the config's work_dir, or "
                        './work_dirs/NAME_OF_CONFIG)')
    parser.add_argument('--launcher', choices=('none', 'pytorch', 'slurm', 'mpi'), default='none',
                        help='how this process was started (default: none)')
    # torch.distributed.launch spells it in two ways, depending on its version
    parser.add_argument('--local_rank', '--local-rank', type=int, default=0,
                        help=argparse.SUPPRESS)
    group = parser.add_argument_group('reproducibility (these set keys of `randomness`)')
    group.add_argument('--seed', type=int, metavar='N', help='seed of everything random')
    group.add_argument('--deterministic', nargs='?', const=True, type=lambda text: choice(
        text.lower(), {'warn': 'warn', 'true': True, 'false': False}),
                       metavar='warn|false',
                       help='equal bits, or an error; with "warn", a warning instead of the error')
    group.add_argument('--diff-rank-seed', action='store_true', default=None,
                       help='ranks differ in what is random inside the model')
    group.add_argument('--virtual-ranks', type=at_least(1), metavar='V',
                       help='the run has V ranks on any number of processes, with the same bits')
    return parser


def choice(text: str, values: dict[str, Any]) -> Any:
    """Return the setting that a value of the command line stands for."""
    if text not in values:
        raise argparse.ArgumentTypeError(
            f'{text!r} is not allowed; allowed: {", ".join(values)}, or no value (put the config '
            'first)')
    return values[text]


def load(args: argparse.Namespace, parser: Parser) -> Config:
    """Return the config with the command line in it; may start this process again."""
    count = os.environ.get('WORLD_SIZE', '1')
    if args.launcher == 'none' and 'TORCHELASTIC_RUN_ID' in os.environ and count != '1':
        parser.error(f'--launcher none: torchrun has started {count} processes, and each would be '
                     'a run of its own in one folder; give --launcher pytorch')
    os.environ.setdefault('LOCAL_RANK', str(args.local_rank))
    options = without_mark(args.cfg_options or {})
    asked = {key: getattr(args, key) for key in RANDOMNESS_ARGUMENTS}
    for key, value in asked.items():
        option = options.get(f'randomness.{key}', value)
        if value is not None and option != value:
            parser.error(f'--{key.replace("_", "-")} says {value!r} and --cfg-options '
                         f'randomness.{key} says {option!r}; give one of them')
    cfg = config_of(args.config, args.cfg_options, imports=False)
    cfg.launcher = args.launcher
    given = {key: value for key, value in asked.items() if value is not None}
    if 'virtual_ranks' in given:
        cfg.randomness = with_virtual_ranks(cfg.get('randomness'), given.pop('virtual_ranks'))
    if given:
        cfg.randomness = dict(cfg.get('randomness') or {}, **given)
    for hook in cfg.get('custom_hooks') or ():
        if isinstance(hook, str):
            raise ConfigError(
                f'custom_hooks holds {hook!r}, which is no hook; --cfg-options cannot write '
                'dict(...). For fingerprints, give --fingerprint to train; another hook belongs '
                'into the config: custom_hooks = _base_.custom_hooks + [dict(type=...)]')
    if args.work_dir is not None:
        cfg.work_dir = args.work_dir
    elif cfg.get('work_dir') is None:
        name = os.path.splitext(os.path.basename(args.config))[0]
        cfg.work_dir = os.path.join('./work_dirs', name)
    restart_for(cfg)
    import_modules(cfg)
    return cfg


def on_each_rank(cfg: Config, parser: Parser, use: Callable[[Any], None]) -> None:
    """Call ``use`` with the runner of ``cfg``, on each virtual rank where there are any.

    Raises:
        MissingDataError: names the loader that reads a file that does not exist.
        ConfigError: names the key whose value cannot be used.
        TrainingError: the training failed for a reason that the config shows.
    """
    parser.make_folder(cfg.work_dir, 'work_dir')
    built: list[Any] = []

    def start() -> None:
        built.append(build_runner(cfg))
        use(built[-1])

    try:
        on_ranks(cfg, start)
    except MMReproError:
        raise
    except Exception as error:
        # not at the top: it imports torch, which a process that starts again does not need
        from .mistakes import explained
        known = explained(cfg, error, built[-1] if built else None)
        if known is None:
            raise
        raise known from error
