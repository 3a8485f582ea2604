"""Training and testing from the command line: MMDetection's arguments, and ours.

``tools/train.py``, ``tools/test.py`` and ``mmrepro train``, ``mmrepro test`` are doors to this.
"""
from __future__ import annotations

import argparse
import os
import subprocess
import sys
import warnings
from copy import deepcopy
from typing import Any, Dict, List, Mapping, NoReturn, Optional, Sequence

from mmengine.config import Config, ConfigDict

from ..cli import program_name
from ..cli.arguments import Options, Parser
from ..errors import one_line
from ..fingerprint.schema import LEVELS
from .process import add_fingerprints

__all__ = ['RESTARTED', 'apply_randomness', 'build_runner', 'restart_if_incomplete', 'test',
           'train']

# set in the environment of a process that has started itself again; it does so once
RESTARTED = 'MMREPRO_RESTARTED'

# command line argument (as argparse names it) -> key of `randomness`
RANDOMNESS_ARGUMENTS = {
    'seed': 'seed',
    'deterministic': 'deterministic',
    'diff_rank_seed': 'diff_rank_seed',
}

TEST_TIME_AUGMENTATION = dict(
    type='DetTTAModel', tta_cfg=dict(nms=dict(type='nms', iou_threshold=0.5), max_per_img=100))
TEST_TIME_META_KEYS = ('img_id', 'img_path', 'ori_shape', 'img_shape', 'scale_factor', 'flip',
                       'flip_direction')


def train(argv: Optional[Sequence[str]] = None) -> int:
    """Train a detector; ``argv`` is the command line without the program's name."""
    parser = _parser('train', 'Train a detector.')
    parser.add_argument('--amp', action='store_true', help='train with automatic mixed precision')
    parser.add_argument('--auto-scale-lr', action='store_true',
                        help="scale the learning rate with the batch size (config's auto_scale_lr)")
    parser.add_argument(
        '--resume', nargs='?', const='auto', metavar='CHECKPOINT',
        help='resume from this checkpoint; without a value, from the latest in the work directory')
    parser.add_argument(
        '--fingerprint', nargs='?', type=_level, const=LEVELS[0], metavar='|'.join(LEVELS),
        help='write digests of every iteration, for compare and localise; changes no bit of the '
        'training (default of the level: step; see docs/reference/fingerprints.md)')
    args = parser.parse_args(argv)
    cfg = _load(args, parser)
    if args.amp:
        cfg.optim_wrapper.type = 'AmpOptimWrapper'
        cfg.optim_wrapper.loss_scale = 'dynamic'
    if args.auto_scale_lr:
        _scale_learning_rate(cfg)
    if args.resume is not None:
        cfg.resume = True
        cfg.load_from = None if args.resume == 'auto' else _checkpoint(args.resume, parser)
    if args.fingerprint is not None:
        add_fingerprints(cfg, args.fingerprint)
    runner = _runner(cfg, parser)
    with one_line(parser, cfg):
        runner.train()
    return 0


def test(argv: Optional[Sequence[str]] = None) -> int:
    """Evaluate a checkpoint; ``argv`` is the command line without the program's name."""
    parser = _parser('test', 'Evaluate a detector.', checkpoint=True)
    parser.add_argument('--out', metavar='FILE.pkl', help='write the predictions to a pickle file')
    parser.add_argument('--show', action='store_true', help='show the predictions in a window')
    parser.add_argument('--show-dir', metavar='DIR',
                        help='draw the predictions into WORK_DIR/TIMESTAMP/DIR')
    parser.add_argument('--wait-time', type=float, default=2, metavar='SECONDS',
                        help='how long --show shows one image (default: 2)')
    parser.add_argument('--tta', action='store_true', help='test with augmented images')
    args = parser.parse_args(argv)
    if args.out is not None and not args.out.endswith(('.pkl', '.pickle')):
        parser.error(f'--out {args.out}: the name must end in .pkl or .pickle')
    cfg = _load(args, parser)
    cfg.load_from = _checkpoint(args.checkpoint, parser)
    if args.show or args.show_dir:
        from mmdet.engine.hooks.utils import trigger_visualization_hook
        cfg = trigger_visualization_hook(cfg, args)
    if args.tta:
        _augment_test(cfg)
    runner = _runner(cfg, parser)
    if args.out is not None:
        from mmdet.evaluation import DumpDetResults
        runner.test_evaluator.metrics.append(DumpDetResults(out_file_path=args.out))
    with one_line(parser, cfg):
        runner.test()
    return 0


def apply_randomness(cfg: Config, asked: Mapping[str, Any]) -> None:
    """Write the arguments that were given into ``cfg.randomness``; None is not given."""
    given = {key: value for key, value in asked.items() if value is not None}
    if given:
        cfg.randomness = dict(cfg.get('randomness') or {}, **given)


def restart_if_incomplete(env: Mapping[str, str], mode: Any = True,
                          num_threads: Optional[int] = None) -> None:
    """Start this process again when a variable that must exist before Python starts is missing.

    ``mode`` and ``num_threads`` are ``deterministic`` and ``num_threads`` of ``randomness``. The
    process keeps its id, its standard streams and its place in a distributed launch. Every rank
    decides alike, because the decision depends on the environment and the config alone.

    Raises:
        RuntimeError: when variables are missing although the process has started again.
    """
    from ..determinism import missing_at_start
    missing = missing_at_start(env, mode=mode, num_threads=num_threads)
    if not missing:
        return
    text = ' '.join(f'{name}={value}' for name, value in sorted(missing.items()))
    if env.get(RESTARTED):
        raise RuntimeError(f'{text} did not survive a restart of this process; set it in the shell '
                           'that starts the training')
    if env.get('RANK', '0') == '0':
        print(f'mmrepro: starting again with {text} (read when Python starts)', file=sys.stderr)
    _execute({**env, **missing, RESTARTED: '1'})


def _execute(env: Dict[str, str]) -> NoReturn:
    # orig_argv (Python 3.10) keeps the interpreter's own arguments, such as -u and -m
    command = [sys.executable, *getattr(sys, 'orig_argv', [sys.executable, *sys.argv])[1:]]
    sys.stdout.flush()
    sys.stderr.flush()
    if os.name == 'nt':  # execve there starts a new process and lets the shell go on
        sys.exit(subprocess.call(command, env=env))
    os.execve(command[0], command, env)


def _parser(verb: str, description: str, checkpoint: bool = False) -> argparse.ArgumentParser:
    example = 'CONFIG CHECKPOINT' if checkpoint else 'CONFIG'
    parser = Parser(
        prog=program_name(verb), description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog=f'example:\n  %(prog)s {example} --seed 42 --deterministic --cfg-options '
        'train_dataloader.num_workers=4')
    parser.add_argument('config', help='path of the config')
    if checkpoint:
        parser.add_argument('checkpoint', help='path of the checkpoint')
    parser.add_argument('--work-dir', metavar='DIR',
                        help="where logs and checkpoints go (default: the config's work_dir, or "
                        './work_dirs/NAME_OF_CONFIG)')
    parser.add_argument('--cfg-options', nargs='+', action=Options, metavar='KEY=VALUE',
                        help='change settings of the config: a.b=1 c="[1,2]" (no white space '
                        'inside a value)')
    parser.add_argument('--launcher', choices=('none', 'pytorch', 'slurm', 'mpi'), default='none',
                        help='how this process was started (default: none)')
    # torch.distributed.launch spells it in two ways, depending on its version
    parser.add_argument('--local_rank', '--local-rank', type=int, default=0,
                        help=argparse.SUPPRESS)
    group = parser.add_argument_group('reproducibility (these set keys of `randomness`)')
    group.add_argument('--seed', type=int, metavar='N', help='seed of everything random')
    group.add_argument('--deterministic', nargs='?', type=_deterministic, const=True,
                       metavar='warn|false',
                       help='equal bits, or an error; with "warn", a warning instead of the error')
    group.add_argument('--diff-rank-seed', action='store_true', default=None,
                       help='ranks differ in what is random inside the model')
    return parser


def _deterministic(text: str) -> Any:
    values = {'warn': 'warn', 'true': True, 'false': False}
    if text.lower() not in values:
        raise argparse.ArgumentTypeError(
            f'{text!r} is not allowed; allowed: {", ".join(values)}, or no value (put the config '
            'first)')
    return values[text.lower()]


def _level(text: str) -> str:
    if text not in LEVELS:
        raise argparse.ArgumentTypeError(
            f'{text!r} is not allowed; allowed: {", ".join(LEVELS)}, or no value (put the config '
            'first)')
    return text


def _load(args: argparse.Namespace, parser: argparse.ArgumentParser) -> Config:
    """The config with the command line in it; may start this process again."""
    os.environ.setdefault('LOCAL_RANK', str(args.local_rank))
    if not os.path.isfile(args.config):
        parser.error(f'{args.config}: no such config')
    cfg = Config.fromfile(args.config)
    cfg.launcher = args.launcher
    options = args.cfg_options or {}
    asked = {key: getattr(args, name) for name, key in RANDOMNESS_ARGUMENTS.items()}
    for key, value in asked.items():
        other = options.get(f'randomness.{key}', value)
        if value is not None and other != value:
            parser.error(f'--{key.replace("_", "-")} says {value!r} and --cfg-options '
                         f'randomness.{key} says {other!r}; give one of them')
    cfg.merge_from_dict(options)
    apply_randomness(cfg, asked)
    _check_hooks(cfg, parser)
    if args.work_dir is not None:
        cfg.work_dir = args.work_dir
    elif cfg.get('work_dir') is None:
        name = os.path.splitext(os.path.basename(args.config))[0]
        cfg.work_dir = os.path.join('./work_dirs', name)
    randomness = cfg.get('randomness') or {}
    # the second place is MMDetection 2.x's
    mode = randomness.get('deterministic', cfg.get('deterministic', False))
    restart_if_incomplete(os.environ, mode, randomness.get('num_threads'))
    return cfg


def _check_hooks(cfg: Config, parser: argparse.ArgumentParser) -> None:
    for hook in cfg.get('custom_hooks') or ():
        if isinstance(hook, str):
            parser.error(
                f'custom_hooks holds {hook!r}, which is no hook; --cfg-options cannot write '
                'dict(...). For fingerprints, give --fingerprint to train; another hook belongs '
                'into the config: custom_hooks = _base_.custom_hooks + [dict(type=...)]')


def _checkpoint(path: str, parser: argparse.ArgumentParser) -> str:
    if '://' not in path and not os.path.exists(path):
        parser.error(f'{path}: no such checkpoint')
    return path


def build_runner(cfg: Config) -> Any:
    """The runner that ``cfg`` asks for, as MMDetection's own script builds it."""
    from mmdet.utils import setup_cache_size_limit_of_dynamo
    from mmengine.registry import RUNNERS
    from mmengine.runner import Runner

    # as MMDetection's own script does: the default makes torch.compile give up on detectors
    setup_cache_size_limit_of_dynamo()
    return RUNNERS.build(cfg) if 'runner_type' in cfg else Runner.from_cfg(cfg)


def _runner(cfg: Config, parser: argparse.ArgumentParser) -> Any:
    with one_line(parser, cfg, building=True):
        return build_runner(cfg)


def _scale_learning_rate(cfg: Config) -> None:
    scale = cfg.get('auto_scale_lr') or {}
    if 'base_batch_size' not in scale:
        raise KeyError('--auto-scale-lr needs auto_scale_lr = dict(base_batch_size=...) in the '
                       'config, the batch size that its learning rate was chosen for')
    cfg.auto_scale_lr.enable = True


def _augment_test(cfg: Config) -> None:
    """Wrap model and pipeline for test-time augmentation, with flips if the config names none."""
    if 'tta_model' not in cfg:
        warnings.warn('the config has no tta_model; MMDetection\'s default is used', stacklevel=2)
        cfg.tta_model = deepcopy(TEST_TIME_AUGMENTATION)
    data = cfg.test_dataloader.dataset
    if 'tta_pipeline' not in cfg:
        warnings.warn('the config has no tta_pipeline; flips are used', stacklevel=2)
        innermost = data
        while 'dataset' in innermost:
            innermost = innermost['dataset']
        flips: List[Dict[str, Any]] = [dict(type='RandomFlip', prob=p) for p in (1.0, 0.0)]
        pack = dict(type='PackDetInputs', meta_keys=TEST_TIME_META_KEYS)
        augment = dict(type='TestTimeAug', transforms=[flips, [pack]])
        cfg.tta_pipeline = [*deepcopy(innermost.pipeline[:-1]), augment]
    cfg.model = ConfigDict(**cfg.tta_model, module=cfg.model)
    data.pipeline = cfg.tta_pipeline
