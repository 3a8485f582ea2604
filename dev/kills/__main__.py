"""Kill runs of a config at random moments, resume them, and compare every iteration.

    python -m dev.kills CONFIG --kills 30 --cfg-options train_cfg.max_epochs=3

Exit code 0: all bits are equal, and a run that was spoiled on purpose was seen as different; 1: a
difference, or a training failed; 2: wrong usage; 4: all bits are equal, and the spoiled run was not
seen either.
"""
from __future__ import annotations

import sys
from collections.abc import Sequence

from mmrepro import cli
from mmrepro.cli.arguments import Parser, at_least, finish, shared
from mmrepro.config import randomness_of, with_virtual_ranks
from mmrepro.runs.config_files import config_of
from mmrepro.runs.startup import restart_for

from .campaign import CampaignSettings, campaign_of, interruptible
from .kinds import KINDS
from .report import campaign_report

COMMAND = 'python -m dev.kills'
DEFAULTS = CampaignSettings()


def _parser() -> Parser:
    width = max(map(len, KINDS))
    kinds = '\n'.join(f'  {name:<{width}}  {kind.why}' for name, kind in KINDS.items())
    parser = Parser(
        COMMAND, 'Train a config once without interruption. Then kill runs of it at random '
        'moments, resume them, and compare every iteration.',
        f'interruptions:\n{kinds}\n\n'
        'example:\n  %(prog)s CONFIG --kills 30 --cfg-options train_cfg.max_epochs=3\n\n'
        'exit code: 0 all equal, 1 a difference, or a training failed, 2 wrong usage, '
        '4 not verified: a run that was spoiled on purpose was not seen',
        shared(virtual_ranks=None, ranks=DEFAULTS.ranks, cfg_options=None, json=None,
               work_dir=DEFAULTS.work_dir))
    parser.add_argument('config', metavar='CONFIG', help='path of a config, or package::path; it '
                        'is trained as it is')
    parser.add_argument('--kills', type=at_least(1), default=DEFAULTS.kills, metavar='N',
                        help='interruptions in all (default: %(default)s)')
    parser.add_argument('--kill-seed', type=int, default=DEFAULTS.seed, metavar='S',
                        help='of kinds and moments (default: %(default)s); the training has its '
                        'own')
    parser.add_argument('--processes', metavar='N,N,...', help='let virtual ranks run on these '
                        'numbers of processes: the first for the uninterrupted run, the next for '
                        'each further start, again and again')
    parser.add_argument('--interval', type=at_least(1), default=3, metavar='N',
                        help='iterations between checkpoints (default: %(default)s)')
    parser.add_argument('--span', type=at_least(1), default=DEFAULTS.span, metavar='N',
                        help='most iterations and validation batches from a start to an '
                        'interruption (default: %(default)s)')
    parser.add_argument('--kinds', metavar='A,B', help='only these (default: all possible)')
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Interrupt and compare; returns the exit code."""
    parser = _parser()
    args = parser.parse_args(argv)
    cfg = config_of(args.config, args.cfg_options)
    interruptible(cfg, args.interval)
    virtual = args.virtual_ranks or randomness_of(cfg).virtual_ranks.ranks
    ranks, processes = args.ranks, []
    if virtual is not None or args.processes is not None:
        if ranks != 1:
            parser.error(f'--ranks {ranks}: a process for each rank, and these are virtual; give '
                         '--virtual-ranks and --processes')
        processes = parser.processes(args.processes or '1', virtual)
        ranks = virtual or max(processes)
        cfg.randomness = with_virtual_ranks(cfg.randomness, ranks)
    kinds = [name.strip() for name in (args.kinds or '').split(',') if name]
    settings = CampaignSettings(parser.make_folder(args.work_dir), args.kills, args.kill_seed,
                                ranks, kinds, args.span, processes)
    campaign = campaign_of(cfg, settings, lambda text: print(text, file=sys.stderr, flush=True))
    restart_for(cfg)
    print(f'changed: a checkpoint every {args.interval} iterations; the seed, where there is none',
          file=sys.stderr)
    campaign.run()
    report = campaign_report(campaign.outcome())
    report.data.update(config=args.config, options=list(args.options_as_given))
    return finish(report, args)


if __name__ == '__main__':
    sys.exit(cli.run(COMMAND, main=main))
