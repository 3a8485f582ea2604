"""``mmrepro chaos``: kill a run at random moments, resume it, compare every iteration."""
from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Sequence
from typing import Any

from mmengine.config import Config

from ..config import randomness_of
from ..exit_codes import DIFFERENT, DONE
from ..runs.startup import restart_for
from ..verify.kills.campaign import Campaign, CampaignSettings, summary
from ..verify.kills.kinds import KINDS, allowed
from .arguments import Parser


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 0: all interrupted runs equal the uninterrupted one; 1: not; 2: wrong usage."""
    listed = '\n'.join(f'  {name:<{max(map(len, KINDS))}}  {kind.why}'
                       for name, kind in KINDS.items())
    parser = Parser(
        'chaos', 'Train once undisturbed. Then train again and again, interrupt at random '
        'moments,\nresume, and compare every iteration with the undisturbed run.',
        f'example:\n  %(prog)s CONFIG --kills 30 --seed 1 --cfg-options '
        f'train_cfg.max_epochs=3\n\ninterruptions:\n{listed}')
    parser.add_argument('config', help='path of the config')
    parser.add_number('--kills', 10, 'N', 'interruptions in all')
    parser.add_number('--seed', 0, 'S', 'of kinds and moments; the training has its own')
    parser.add_number('--ranks', 1, 'R', 'ranks of each run, a process each')
    parser.add_argument('--processes', metavar='N,N,...', help='let virtual ranks run on these '
                        'numbers of processes: the first for the undisturbed run, the next for '
                        'each further start, again and again')
    parser.add_argument('--virtual-ranks', type=int, metavar='V', help='ranks of each run, with '
                        "--processes (default: the config's, or the largest number of processes)")
    parser.add_number('--interval', 3, 'N', 'iterations between checkpoints')
    parser.add_number('--span', 8, 'N', 'most iterations and validation batches from a start to an '
                      'interruption')
    parser.add_argument('--kinds', metavar='A,B', help='only these (default: all possible)')
    parser.add_argument('--work-dir', default='work_dirs/chaos', metavar='DIR',
                        help='an empty folder (default: work_dirs/chaos)')
    parser.add_argument('--json', metavar='FILE', help='write the outcome here as well')
    parser.add_config_options()
    args = parser.parse_args(argv)
    config = parser.read_config(args.config, args.cfg_options)
    if args.json:
        parser.make_folder_of(args.json, '--json')
    if os.path.isdir(args.work_dir) and os.listdir(args.work_dir):
        parser.error(f'--work-dir {args.work_dir}: is not empty, and a run that finds '
                     'checkpoints resumes')
    parser.make_folder(args.work_dir)
    prepare(config, args.interval)
    print(f'changed: a checkpoint every {args.interval} iterations; the seed, where there is none')
    ranks, processes = _ranks(config, args, parser)
    workers = config.train_dataloader.get('num_workers', 0)
    possible = allowed(max(processes or [ranks]), workers)
    kinds = ([name.strip() for name in args.kinds.split(',')] if args.kinds else possible)
    for name in kinds:
        if name not in possible:
            parser.error(f'--kinds {name!r}: with {max(processes or [ranks])} process(es) and '
                         f'{workers} worker(s), '
                         f'possible are {", ".join(map(repr, possible))}')
    restart_for(config)
    started = time.time()
    campaign = Campaign(config, CampaignSettings(
        os.path.abspath(args.work_dir), args.kills, args.seed, ranks, workers, kinds,
        args.span, processes))
    equal = campaign.run()
    outcome = dict(summary(campaign, started), config=args.config,
                   options={key: str(value) for key, value in (args.cfg_options or {}).items()})
    if args.json is not None:
        with open(args.json, 'w') as file:
            json.dump(outcome, file, indent=1)
    print(f'\n{table(outcome)}')
    return DONE if equal else DIFFERENT


def _ranks(config: Config, args: argparse.Namespace, parser: Parser) -> tuple[int, list[int]]:
    """The number of ranks, and where they are virtual, the numbers of processes."""
    virtual = args.virtual_ranks or randomness_of(config).virtual_ranks.ranks
    if args.processes is None:
        if virtual is None:
            return args.ranks, []
        args.processes = '1'
    if args.ranks != 1:
        parser.error(f'--ranks {args.ranks}: a process for each rank, and these are virtual; give '
                     '--virtual-ranks and --processes')
    numbers = parser.processes(args.processes, virtual)
    ranks = virtual or max(numbers)
    config.randomness['virtual_ranks'] = ranks
    return ranks, numbers


def prepare(config: Config, interval: int) -> None:
    """Let ``config`` write a checkpoint every ``interval`` iterations, and fix its seed."""
    hooks = config.setdefault('default_hooks', {})
    own = dict(hooks.get('checkpoint') or dict(type='CheckpointHook'))
    own.update(by_epoch=False, interval=interval)
    own.setdefault('max_keep_ckpts', 2)
    hooks['checkpoint'] = own
    randomness = dict(config.get('randomness') or {})
    if randomness.get('seed') is None:  # otherwise every run would draw one
        randomness['seed'] = 0
    config.randomness = randomness


def _ranks_text(settings: dict[str, Any]) -> str:
    processes = settings['processes']
    return f'{settings["ranks"]} rank(s)' if not processes else (
        f'{settings["ranks"]} virtual ranks on {", ".join(map(str, processes))} processes')


def table(outcome: dict[str, Any]) -> str:
    """A Markdown table, one row per kind of interruption."""
    lines = ['| interruption | times | exit codes | iterations done again (most) | '
             'seconds to the end (most) |', '|---|---|---|---|---|']
    for kind in KINDS:
        kills = [kill for kill in outcome['kills'] if kill['kind'] == kind]
        if not kills:
            continue
        codes = ', '.join(map(str, sorted({code for kill in kills for code in kill['codes']})))
        again = max((kill['done'] - kill['resumed'] for kill in kills
                     if kill['resumed'] is not None), default=0)
        forced = sum(bool(kill['ended_by_us']) for kill in kills)
        lines.append(f'| {kind} | {len(kills)} | {codes} | {again} | '
                     f'{max(kill["seconds"] for kill in kills):.1f}'
                     f'{f" ({forced} ended from outside)" if forced else ""} |')
    half = sum(kill['half_written'] > 0 for kill in outcome['kills'])
    lines += ['', f'{len(outcome["kills"])} interruptions of {outcome["runs"]} runs of '
              f'{outcome["iterations_of_a_run"]} iterations, {_ranks_text(outcome["settings"])}; '
              f'{half} left a half-written checkpoint behind; '
              f'{outcome["compared"]} records compared: '
              f'{"all bits equal" if outcome["equal"] else "DIFFERENT"}']
    return '\n'.join([*lines, *outcome['problems']])
