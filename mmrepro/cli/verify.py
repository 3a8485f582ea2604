"""``mmrepro verify``: train in fresh processes, vary what must not matter, compare the bits."""
from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from ..config import randomness_of, with_virtual_ranks
from ..reports import interruptible, kills, verify, verify_run
from ..runs.config_files import config_of
from ..runs.progress import progress_line
from ..runs.startup import restart_for
from ..verify.kills.campaign import CampaignSettings
from ..verify.kills.kinds import KINDS
from ..verify.variations import USUAL, VARIATIONS
from .arguments import Parser, at_least, finish, shared

ALL, KILLS = 'all', 'kills'  # of --vary
DEFAULTS = CampaignSettings()
WORK_DIR = os.path.join('work_dirs', 'verify')
# options of ordinary variations, which have no meaning for kills
ORDINARY = ('iters', 'level', 'full', 'demo_data', 'jobs', 'at', 'localise')
OF_KILLS = ('kills', 'kill_seed', 'ranks', 'processes', 'interval', 'span', 'kinds')


def _parser() -> Parser:
    rows = '\n'.join(f'  {name:<10}  {row.title}{"" if name in USUAL else " (not by default)"}'
                     for name, row in VARIATIONS.items())
    width = max(map(len, KINDS))
    kinds = '\n'.join(f'  {name:<{width}}  {kind.why}' for name, kind in KINDS.items())
    parser = Parser(
        'verify', 'Train a config in several fresh processes, varying what must not matter, and '
        'compare the bits. With --vary kills, kill runs of the config at random moments, resume '
        'them, and compare every iteration.',
        f'variations:\n{rows}\n  {KILLS:<10}  killed at random moments, again and again (alone)'
        f'\n\ninterruptions:\n{kinds}\n\n'
        'examples:\n  mmrepro verify configs/demo/faster-rcnn_r50_fpn_demo.py --demo-data\n'
        '  mmrepro verify CONFIG --vary kills --kills 30 --cfg-options train_cfg.max_epochs=3\n'
        '  mmrepro verify configs/demo/yolox_s_demo.py --vary resume --localise\n\n'
        'exit code: 0 all equal, 1 a difference, or a training failed, 2 wrong usage, '
        '3 nothing was compared, 4 not verified: the control was not seen',
        shared(iters=5, virtual_ranks=None, full=False, level='step', demo_data=None,
               cfg_options=None, json=None, work_dir=None))
    parser.add_argument('config', metavar='CONFIG', help='path of a config, or package::path; or '
                        'the work directory of a run, to repeat and resume it as it is')
    parser.add_argument('--vary', metavar='NAME,...',
                        help=f'what to vary, or all (default: {",".join(USUAL)}; of virtual ranks '
                        'ranks as well)')
    parser.add_argument('--jobs', type=at_least(1), metavar='N',
                        help='runs at a time (default: 2 where there are cores for them, 1 on a '
                        'GPU)')
    parser.add_argument('--localise', action='store_true',
                        help='when bits differ, go on and name the cause')
    parser.add_argument('--at', type=at_least(1), metavar='K', help='resume and validate after '
                        'this many iterations (default: half of them)')
    group = parser.add_argument_group('--vary kills, which trains the config as it is')
    group.add_argument('--kills', type=at_least(1), metavar='N',
                       help=f'interruptions in all ({DEFAULTS.kills})')
    group.add_argument('--kill-seed', type=int, metavar='S', help='of kinds and moments '
                       f'({DEFAULTS.seed}); the training has its own')
    group.add_argument('--ranks', type=at_least(1), metavar='N',
                       help=f'ranks of each run, a process each ({DEFAULTS.ranks})')
    group.add_argument('--processes', metavar='N,N,...', help='let virtual ranks run on these '
                       'numbers of processes: the first for the undisturbed run, the next for '
                       'each further start, again and again')
    group.add_argument('--interval', type=at_least(1), metavar='N',
                       help='iterations between checkpoints (3)')
    group.add_argument('--span', type=at_least(1), metavar='N', help='most iterations and '
                       f'validation batches from a start to an interruption ({DEFAULTS.span})')
    group.add_argument('--kinds', metavar='A,B', help='only these (default: all possible)')
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Compare runs; exit code 0: all equal, 1: different, 3: nothing compared, 4: not verified."""
    parser = _parser()
    args = parser.parse_args(argv)
    if os.path.isdir(args.config):
        parser.refuse(args, 'has no meaning for a work directory', 'vary', *ORDINARY, *OF_KILLS)
        with progress_line(sys.stderr) as say:
            return finish(verify_run(args.config, say), args)
    names = None if args.vary is None else [
        name.strip() for name in args.vary.split(',') if name.strip()]
    if names == [KILLS]:
        parser.refuse(args, f'has no meaning with --vary {KILLS}', *ORDINARY)
        return _kills(args, parser)
    parser.refuse(args, f'is for --vary {KILLS}, alone', *OF_KILLS)
    names = names and [row for name in names for row in (VARIATIONS if name == ALL else (name, ))]
    work_dir = parser.make_folder(args.work_dir or WORK_DIR)
    with progress_line(sys.stderr) as say:
        report = verify(
            args.config, vary=names, iterations=args.iters, level=args.level, full=args.full,
            ranks=args.virtual_ranks, demo_data=args.demo_data, options=args.cfg_options,
            jobs=args.jobs, work_dir=work_dir, at=args.at, explain=args.localise,
            say=say)
    return finish(report, args)


def _kills(args: argparse.Namespace, parser: Parser) -> int:
    cfg = config_of(args.config, args.cfg_options)
    interval = args.interval or 3
    interruptible(cfg, interval)
    virtual = args.virtual_ranks or randomness_of(cfg).virtual_ranks.ranks
    ranks, processes = args.ranks or DEFAULTS.ranks, []
    if virtual is not None or args.processes is not None:
        if ranks != 1:
            parser.error(f'--ranks {ranks}: a process for each rank, and these are virtual; give '
                         '--virtual-ranks and --processes')
        processes = parser.processes(args.processes or '1', virtual)
        ranks = virtual or max(processes)
        cfg.randomness = with_virtual_ranks(cfg.randomness, ranks)
    folder = parser.make_folder(args.work_dir or os.path.join(WORK_DIR, KILLS))
    restart_for(cfg)
    print(f'changed: a checkpoint every {interval} iterations; the seed, where there is none',
          file=sys.stderr)
    kinds = [name.strip() for name in (args.kinds or '').split(',') if name]
    settings = CampaignSettings(
        folder, args.kills or DEFAULTS.kills, args.kill_seed or DEFAULTS.seed, ranks, kinds,
        args.span or DEFAULTS.span, processes)
    report = kills(cfg, settings, lambda text: print(text, file=sys.stderr, flush=True))
    report.data.update(config=args.config, options=list(args.options_as_given))
    return finish(report, args)
