"""Train again from a manifest; compare the fingerprints, stop at the first difference."""
from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import time
import warnings
from typing import Any, Callable, Dict, List, Mapping, NamedTuple, Optional, Sequence, Tuple

from mmengine.config import Config

from ..cli import program_name
from ..cli.arguments import Parser, quiet_when_reader_leaves
from ..fingerprint.difference import ComparedField, Divergence, first_divergence
from ..fingerprint.manifest import ORDER, Manifest, compare_manifests, read_manifest
from ..fingerprint.provenance import environment
from ..fingerprint.reader import FingerprintError, RankLog, read_ranks, read_run
from ..fingerprint.schema import FOLDER
from ..report.terminal import show
from ..runs.process import POLL, Fresh, Plan, TrainingFailed
from ..runs.progress import Line

__all__ = ['Outcome', 'compare_logs', 'compare_vals', 'main', 'prepare', 'replay']

MAX_ROWS = 12  # differences of the environment that are shown of each severity
# of the recorded environment, what was the other machine's business
NOT_REPLAYED = ('WORLD_SIZE', 'LOCAL_WORLD_SIZE', 'SLURM_NTASKS', 'CUDA_VISIBLE_DEVICES',
                'NVIDIA_VISIBLE_DEVICES', 'MMREPRO_RESTARTED')
# what a replay changes itself, or what only says when and where
BY_DESIGN = ('created', 'command', 'cwd', 'work_dir', 'config.default_hooks.checkpoint',
             'environment.MMREPRO_')


class Outcome(NamedTuple):
    """What a replay came to.

    Attributes:
        compared: iterations that agree, before the first difference.
        difference: the first one.
        environment: differences between the two manifests.
        notes: what the original's files are like.
    """
    compared: int
    difference: Optional[Divergence]
    environment: List[Any]
    notes: List[str]

    @property
    def rank(self) -> int:
        return self.difference.rank if self.difference else 0


def prepare(manifest: Manifest, work_dir: str) -> str:
    """Write the config of the replay into ``work_dir`` and return its path.

    It is the original's, except for where results go: no checkpoints are written.

    Raises:
        FingerprintError: the run began in the middle, at a checkpoint that is gone.
    """
    resumed = manifest.content['resumed_from']
    if resumed and not os.path.isfile(resumed):
        raise FingerprintError(f'{manifest.path}: the run resumed from {resumed}, which does not '
                               'exist')
    os.makedirs(work_dir, exist_ok=True)
    path = os.path.join(work_dir, 'config.py')
    with open(path, 'w', encoding='utf-8') as file:
        file.write(manifest.config_text)
    cfg = Config.fromfile(path, import_custom_modules=False)
    cfg.work_dir = os.path.abspath(work_dir)
    cfg.resume, cfg.load_from = bool(resumed), resumed or cfg.get('load_from')
    cfg.launcher = 'pytorch' if manifest.content['world_size'] > 1 else 'none'
    hooks = cfg.get('default_hooks') or {}
    if hooks.get('checkpoint'):
        cfg.default_hooks.checkpoint = dict(type='CheckpointHook', interval=-1, save_last=False)
    cfg.dump(path)
    return path


def replay(run_dir: str, work_dir: str, iterations: Optional[int] = None,
           say: Callable[[str], None] = lambda text: None,
           report: Callable[[List[Any]], None] = lambda found: None) -> Outcome:
    """Train again and compare while it runs.

    Args:
        run_dir: work directory of the original.
        work_dir: of the replay; fingerprints of an earlier replay in it are removed.
        iterations: stop after so many; None: as many as the original has.
        say: is told the progress, one line.
        report: is told the differences between the manifests, as soon as the second exists.

    Raises:
        FingerprintError: the original cannot be read or has no iterations.
        TrainingFailed: the training ended with an error.
    """
    original, manifest = read_run(run_dir), read_manifest(run_dir)
    _check_place(run_dir, work_dir)
    wanted = {rank: log.steps for rank, log in original.ranks.items()}
    if not any(wanted.values()):
        raise FingerprintError(f'{run_dir}: no iteration was recorded')
    last = max(max(steps) for steps in wanted.values() if steps) + 1
    end = min(last, iterations or last)
    shutil.rmtree(os.path.join(work_dir, FOLDER), ignore_errors=True)
    config = prepare(manifest, work_dir)
    then = manifest.content['environment']
    env = {name: then.get(name) for name in {*then, *environment()} if name not in NOT_REPLAYED}
    cwd = manifest.content['cwd']
    whole = end == last and all(log.ended for log in original.ranks.values())
    arguments = [] if whole else ['--iterations', str(end)]
    fresh = Fresh(Plan(os.path.abspath(config), os.path.abspath(work_dir),
                       arguments, env, ranks=manifest.content['world_size'],
                       cwd=cwd if os.path.isdir(cwd) else None))
    return _follow(fresh, original, manifest, end, say, report)


def _check_place(run_dir: str, work_dir: str) -> None:
    if os.path.realpath(work_dir) == os.path.realpath(run_dir):
        raise FingerprintError(f'--work-dir {work_dir} is the run itself; its fingerprints would '
                               'be lost')


def _follow(fresh: Fresh, original: Any, manifest: Manifest, end: int, say: Any,
            report: Any) -> Outcome:
    """Compare what the process has written so far, until it ends or differs."""
    around: Optional[List[Any]] = None
    started, difference, done, ended = time.monotonic(), None, 0, False
    text = ''
    try:
        while not ended and difference is None:
            ended = fresh.poll()
            if around is None:
                around = _environment(manifest, fresh.plan.work_dir)
                if around is not None:
                    report(around)
            logs = read_ranks(os.path.join(fresh.plan.work_dir, FOLDER))
            difference = compare_logs(original.ranks, logs, end)
            done = min(len(logs[rank].steps) if rank in logs else 0 for rank in original.ranks)
            new = f'iteration {done} of {end}'
            if new != text:
                text = new
                say(f'{time.monotonic() - started:4.0f} s  {text}')
            if not ended and difference is None:
                time.sleep(POLL)
    finally:
        fresh.stop()
    if difference is None:
        lacking = {rank: [i for i in log.steps
                          if i < end and (rank not in logs or i not in logs[rank].steps)]
                   for rank, log in original.ranks.items()}
        rank = min((rank for rank in lacking if lacking[rank]),
                   key=lambda rank: lacking[rank][0], default=None)
        if rank is not None:
            difference = Divergence(lacking[rank][0], {
                rank: (ComparedField('iteration', 'there', None), )})
    steps = original.ranks[difference.rank if difference else 0].steps
    compared = len([i for i in steps
                    if i < (end if difference is None else difference.iteration)])
    return Outcome(compared, difference, around or [], original.notes)


def compare_logs(original: Mapping[int, RankLog], logs: Mapping[int, RankLog],
                 end: int) -> Optional[Divergence]:
    """The first difference before iteration ``end``: of an iteration, else of a validation."""
    before = {rank: log._replace(steps={i: step for i, step in log.steps.items() if i < end})
              for rank, log in original.items()}
    found = first_divergence(before, logs)
    if found is not None:
        return found
    for rank in sorted(set(original) & set(logs)):
        found = compare_vals(original[rank].vals, logs[rank].vals, end)
        if found is not None:
            return Divergence(found[0], {rank: (found[1], )})
    return None


def compare_vals(first: Sequence[Dict[str, Any]], second: Sequence[Dict[str, Any]],
                 end: int) -> Optional[Tuple[int, ComparedField]]:
    """The first metric that differs, among validations after the same iteration."""
    others = {val['iteration']: val['metrics'] for val in second}
    for val in first:
        there = others.get(val['iteration'])
        if there is None or val['iteration'] > end:
            continue
        for name, value in val['metrics'].items():
            if there.get(name) != value:
                return val['iteration'], ComparedField(f'metric {name} of the validation', value,
                                                       there.get(name))
    return None


def _environment(manifest: Manifest, work_dir: str) -> Optional[List[Any]]:
    try:
        now = read_manifest(work_dir)
    except FingerprintError:
        return None  # not written yet
    return [one for one in compare_manifests(manifest, now)
            if not one.name.startswith(BY_DESIGN)]


# --- the command ----------------------------------------------------------------------------------

@quiet_when_reader_leaves
def main(argv: Optional[Sequence[str]] = None) -> int:
    """Exit code 0: the same bits; 1: a difference, or the training failed; 2: wrong usage."""
    warnings.filterwarnings('ignore', message='pkg_resources is deprecated')
    parser = _parser()
    args = parser.parse_args(argv)
    if args.iters is not None and args.iters < 1:
        parser.error(f'--iters {args.iters}: must be 1 or more')
    work_dir = args.work_dir or os.path.normpath(args.run) + '_replay'
    progress = Line(sys.stderr)

    def report(found: List[Any]) -> None:
        progress.end()
        if not args.json:
            show(_environment_text(found))

    try:
        outcome = replay(args.run, work_dir, args.iters, progress.say, report)
    except FingerprintError as error:
        progress.end()
        parser.error(str(error))
    except TrainingFailed as error:
        progress.end()
        print(f'\n{error}', file=sys.stderr)
        return 1
    progress.end()
    if args.json:
        print(json.dumps(dict(
            run=args.run, work_dir=work_dir, same=outcome.difference is None,
            compared=outcome.compared, rank=outcome.rank, notes=outcome.notes,
            difference=outcome.difference.as_dict() if outcome.difference else None,
            environment=[one._asdict() for one in outcome.environment]), indent=1, default=str))
    else:
        show(_verdict(args.run, outcome))
    return 0 if outcome.difference is None else 1


def _environment_text(found: Sequence[Any]) -> str:
    if not found:
        return 'environment: the same'
    lines = ['environment: then -> now']
    for severity in ORDER:
        rows = [one for one in found if one.severity == severity]
        if rows:
            lines.append(f'  {severity}:')
        lines += [f'    {one.name}: {_cut(one.then)} -> {_cut(one.now)}  ({one.consequence})'
                  for one in rows[:MAX_ROWS]]
        if len(rows) > MAX_ROWS:
            lines.append(f'    and {len(rows) - MAX_ROWS} more')
    return '\n'.join(lines)


def _cut(value: Any) -> str:
    text = ' '.join(str(value).split())
    return text if len(text) <= 40 else f'{text[:17]}...{text[-20:]}'


def _verdict(run: str, outcome: Outcome) -> str:
    notes = [f'note: {note}' for note in outcome.notes]
    if outcome.difference is None:
        text = f'SAME BITS: {outcome.compared} iterations of {run} were repeated exactly'
    else:
        text = (f'DIFFERENT after {outcome.compared} equal iterations: '
                f'{outcome.difference.text()} (first the original, then the replay)')
    return '\n'.join([*notes, text])


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog=program_name('replay'), description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog='example:\n  mmrepro replay work_dirs/faster-rcnn_r50_fpn_demo --iters 3')
    parser.add_argument('run', metavar='RUN',
                        help='work directory of a run that was trained with --fingerprint')
    parser.add_argument('--iters', type=int, metavar='N',
                        help='repeat the first N iterations (default: all that were recorded)')
    parser.add_argument('--work-dir', metavar='DIR',
                        help='for the replay (default: RUN_replay)')
    parser.add_argument('--json', action='store_true', help='print the outcome as JSON')
    return parser
