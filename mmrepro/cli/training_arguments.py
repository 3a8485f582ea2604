"""Arguments of ``train`` and ``test``: MMDetection's, and keys of `randomness`."""
from __future__ import annotations

import argparse
import os
from typing import Any, Callable

from mmengine.config import Config

from ..config import with_virtual_ranks
from ..errors import ConfigError, MMReproError
from ..runs.config_files import config_of, import_modules, without_mark
from ..runs.startup import build_runner, on_ranks, restart_for
from .arguments import Parser, at_least, shared

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
    """Return what a value of the command line stands for."""
    if text not in values:
        raise argparse.ArgumentTypeError(
            f'{text!r} is not allowed; allowed: {", ".join(values)}, or no value (put the config '
            'first)')
    return values[text]


def load(args: argparse.Namespace, parser: Parser) -> Config:
    """Return the config with the command line in it; may start this process again."""
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
