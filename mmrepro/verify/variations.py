"""Train a config in several fresh processes, varying what must not matter, and compare the bits."""
from __future__ import annotations

import argparse
import copy
import json
import os
import shutil
import sys
import time
import warnings
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Sequence

from mmengine.config import Config, ConfigDict

from ..cli import program_name
from ..cli.arguments import Options, Parser, quiet_when_reader_leaves
from ..fingerprint.difference import ComparedField, Divergence, first_divergence
from ..fingerprint.reader import FingerprintError, read_ranks
from ..fingerprint.schema import FOLDER
from ..report.terminal import show
from ..runs import reduction
from ..runs.process import (
    Fresh,
    Plan,
    TrainingFailed,
    add_fingerprints,
    settings_for,
)
from ..runs.progress import Line, Runs

__all__ = ['VARIATIONS', 'Result', 'certificate', 'main', 'result_of', 'verify']

ITERATIONS = 5
DEMO_DATA = 'data/demo'


class Variation(NamedTuple):
    """One thing that must not matter.

    Attributes:
        title: for the certificate.
        change: makes the variation's config of the reference's, in place.
        env: variables that are other than in the reference.
        kill: the run is killed in its middle and resumed.
        validate: the run validates in its middle; the reference never does.
    """
    title: str
    change: Callable[[Config], None] = lambda cfg: None
    env: Dict[str, str] = {}
    kill: bool = False
    validate: bool = False


def _other_workers(cfg: Config) -> None:
    loader = cfg.train_dataloader
    loader.num_workers = 0 if loader.get('num_workers', 0) else 2
    loader.persistent_workers = False
    loader.prefetch_factor = 3 if loader.num_workers else None


def _keep_checkpoint(cfg: Config) -> None:
    cfg.default_hooks.checkpoint = dict(type='CheckpointHook', by_epoch=False,
                                        interval=max(1, cfg.verify_iterations // 2),
                                        max_keep_ckpts=1)


VARIATIONS = {
    'process': Variation('the same in another process'),
    'workers': Variation('another number of workers', _other_workers),
    'hashseed': Variation('PYTHONHASHSEED=1 instead of 0', env={'PYTHONHASHSEED': '1'}),
    'resume': Variation('killed and resumed', _keep_checkpoint, kill=True),
    'validation': Variation('with a validation in between', validate=True),
}
# variations that are events of a run, not changes of its config: parameters of localise_config
EVENTS = {'resume': 'resume_b', 'validation': 'validate_b'}


class Result(NamedTuple):
    """What became of one variation. ``skipped`` is the reason where it was not run."""
    name: str
    title: str
    iterations: int = 0
    difference: Optional[Divergence] = None
    skipped: str = ''

    @property
    def equal(self) -> bool:
        return not self.skipped and self.difference is None and self.iterations > 0


class Job(NamedTuple):
    """A variation (or the reference) as the trainings to run one after the other."""
    name: str
    folder: str
    plans: List[Plan]


def verify(cfg: Config, work_dir: str, names: Sequence[str], iterations: int, jobs: int,
           level: str = 'step', say: Callable[[str], None] = lambda text: None) -> List[Result]:
    """Run the reference and the variations; every one in processes of its own.

    Args:
        cfg: a config whose data exist.
        work_dir: for configs, logs and fingerprints; what an earlier call left is removed.
        names: keys of :data:`VARIATIONS`.
        iterations: that each of them trains.
        jobs: how many run at a time.
        level: of the fingerprints.
        say: is told the progress, one line.

    Raises:
        TrainingFailed: a training ended with an error.
    """
    prepared = _prepared(cfg, iterations, level)
    skipped = _skipped(cfg, names, iterations)
    waiting = [_job('reference', prepared, work_dir, iterations, cfg)]
    waiting += [_job(name, prepared, work_dir, iterations, cfg) for name in names
                if name not in skipped]
    progress = Runs(waiting, iterations, say)
    _run(waiting, jobs, progress)
    reference = waiting[0].folder
    return [result_of(name, reference, os.path.join(work_dir, name), iterations,
                      skipped.get(name, '')) for name in names]


def _skipped(cfg: Config, names: Sequence[str], iterations: int) -> Dict[str, str]:
    """Variations that this config cannot have, and why."""
    skipped = {}
    if 'validation' in names and cfg.get('val_cfg') is None:
        skipped['validation'] = 'the config has no validation'
    streams = (cfg.get('randomness') or {}).get('worker_seed', 'sample')
    if 'resume' in names and iterations < 2:
        skipped['resume'] = 'it takes two iterations to be killed between them'
    elif 'resume' in names and streams != 'sample':
        skipped['resume'] = f'with worker_seed={streams!r} no run resumes within an epoch'
    return skipped


def _prepared(cfg: Config, iterations: int, level: str) -> Config:
    """The reference: no validation, no checkpoints."""
    cfg = copy.deepcopy(cfg)
    add_fingerprints(cfg, level)
    cfg.verify_iterations = iterations  # for _keep_checkpoint; nothing else reads it
    for key in ('val_cfg', 'val_dataloader', 'val_evaluator', 'test_cfg', 'test_dataloader',
                'test_evaluator'):
        cfg[key] = None
    cfg.setdefault('default_hooks', ConfigDict())
    cfg.default_hooks.checkpoint = dict(type='CheckpointHook', interval=-1, save_last=False)
    cfg.resume = False
    return cfg


def _job(name: str, prepared: Config, work_dir: str, iterations: int, original: Config) -> Job:
    variation = VARIATIONS.get(name, Variation('reference'))
    folder = os.path.abspath(os.path.join(work_dir, name))
    for stale in (FOLDER, 'output.txt'):
        path = os.path.join(folder, stale)
        shutil.rmtree(path) if os.path.isdir(path) else os.path.exists(path) and os.remove(path)
    os.makedirs(folder, exist_ok=True)
    cfg = copy.deepcopy(prepared)
    variation.change(cfg)
    cfg.work_dir = folder
    arguments = ['--iterations', str(iterations)]
    half = max(1, iterations // 2)
    if variation.validate:
        for key in ('val_cfg', 'val_dataloader', 'val_evaluator'):
            cfg[key] = original[key]
        arguments += ['--validate-after', str(half)]
    path = os.path.join(folder, 'config.py')
    cfg.dump(path)
    env = {'PYTHONHASHSEED': '0', **settings_for(), **variation.env}
    plan = Plan(path, folder, arguments, env)
    if not variation.kill:
        return Job(name, folder, [plan])
    for stale in os.listdir(folder):
        if stale.endswith('.pth') or stale == 'last_checkpoint':
            os.remove(os.path.join(folder, stale))
    # one iteration beyond the checkpoint is lost and trained again
    kill = plan._replace(killed=True, arguments=[*arguments, '--kill-after',
                                                 str(min(half + 1, iterations - 1))])
    return Job(name, folder, [kill, plan._replace(arguments=[*arguments, '--resume'])])


def _run(waiting: Sequence[Job], jobs: int, progress: Runs) -> None:
    """At most ``jobs`` trainings at a time, in the order given."""
    queue = [(job, list(job.plans)) for job in waiting]
    running: List[tuple] = []
    try:
        while queue or running:
            while queue and len(running) < jobs:
                job, plans = queue.pop(0)
                running.append((Fresh(plans.pop(0)), job, plans))
            time.sleep(0.2)
            progress.show()
            for entry in list(running):
                fresh, job, plans = entry
                if fresh.poll():
                    running.remove(entry)
                    if plans:
                        running.append((Fresh(plans.pop(0)), job, plans))
                    else:
                        progress.done(job)
    finally:
        for fresh, _, _ in running:
            fresh.stop()


def result_of(name: str, reference: str, folder: str, iterations: int,
              skipped: str = '') -> Result:
    """What became of a variation, by the fingerprints in its folder and in the reference's."""
    title = VARIATIONS[name].title
    if skipped:
        return Result(name, title, skipped=skipped)
    runs = [read_ranks(os.path.join(path, FOLDER)) for path in (reference, folder)]
    steps = [ranks[0].steps for ranks in runs]
    lacking = [i for i in range(iterations) if not all(i in one for one in steps)]
    difference = first_divergence(*runs)
    if difference is None and lacking:
        difference = Divergence(lacking[0], {0: (
            ComparedField('number of iterations', *map(len, steps)), )})
    return Result(name, title, iterations, difference)


# --- the command ----------------------------------------------------------------------------------

@quiet_when_reader_leaves
def main(argv: Optional[Sequence[str]] = None) -> int:
    """Exit code 0: all equal; 1: a difference, or a training failed; 2: wrong usage."""
    warnings.filterwarnings('ignore', message='pkg_resources is deprecated')
    parser = _parser()
    args = parser.parse_args(argv)
    names = _names(args, parser)
    if not os.path.isfile(args.config):
        parser.error(f'{args.config}: no such config')
    try:
        cfg, notes = _load(args, names)
    except (reduction.MissingData, OSError, KeyError, SyntaxError, ImportError) as error:
        parser.error(f'{args.config}: {error}')
    threads = int(settings_for()['OMP_NUM_THREADS'])
    jobs = args.jobs or (1 if _has_gpu() else max(1, min(2, (os.cpu_count() or 1) // threads)))
    progress = Line(sys.stderr)
    started = time.monotonic()
    parser.make_folder(args.work_dir)
    try:
        results = verify(cfg, args.work_dir, names, args.iters, jobs, args.level, progress.say)
    except (TrainingFailed, FingerprintError) as error:
        progress.end()
        print(f'\n{error}', file=sys.stderr)
        return 1
    progress.end()
    notes.append(f'{args.iters} iterations, fingerprints of level {args.level}, '
                 f'{time.monotonic() - started:.0f} s')
    same = all(result.equal or result.skipped for result in results) and any(
        result.equal for result in results)
    if not args.json:
        show(certificate(args.config, results, notes, args.work_dir))
    found = _localise(results, args.work_dir, args.iters) if args.localise else None
    if args.json:
        localised = found.as_dict() if found else None
        print(json.dumps(dict(_as_json(args, results, notes, same), localise=localised), indent=1))
    elif found:
        show(found.text())
    return 0 if same else 1


def _localise(results: Sequence[Result], work_dir: str, iterations: int) -> Any:
    """Name the cause of the first variation that differs; see ``mmrepro localise``."""
    name = next((result.name for result in results if result.difference is not None), None)
    if name is None:
        return None
    from ..localise.compared_runs import RunFailed
    from ..localise.entry import localise_config, localise_runs, unused_folder
    reference, other = (os.path.join(work_dir, which) for which in ('reference', name))
    folder = unused_folder(os.path.join(work_dir, 'localise'))
    os.makedirs(folder)
    try:
        if name not in EVENTS:
            print(f'\nmmrepro localise {reference} {other}', file=sys.stderr, flush=True)
            return localise_runs(reference, other, folder)
        # the reference has no validation that run B could run
        config = os.path.join(reference if name == 'resume' else other, 'config.py')
        half = max(1, iterations // 2)
        print(f'\nmmrepro localise {config} --{EVENTS[name].replace("_", "-")} {half} --iters '
              f'{iterations}', file=sys.stderr, flush=True)
        return localise_config(config, folder, iterations, **{EVENTS[name]: half})
    except (RunFailed, FingerprintError, ValueError) as error:
        print(error, file=sys.stderr)
        return None


def certificate(config: str, results: Sequence[Result], notes: Sequence[str],
                work_dir: str) -> str:
    """The table that the command prints."""
    width = max(len(result.title) for result in results)
    lines = [f'{config}', *(f'  {note}' for note in notes), '']
    for result in results:
        verdict = (f'not run: {result.skipped}' if result.skipped else 'equal' if result.equal
                   else f'DIFFERENT  {result.difference.text()}')
        lines.append(f'  {result.name:<10}  {result.title:<{width}}  {verdict}')
    different = [result for result in results if result.difference is not None]
    if different:
        lines += ['', f'DIFFERENT BITS in {len(different)} of {len(results)} variations. Both '
                  f'runs are in {work_dir}; to see them side by side:',
                  f'  mmrepro compare {os.path.join(work_dir, "reference")} '
                  f'{os.path.join(work_dir, different[0].name)}']
    elif any(result.equal for result in results):
        lines += ['', 'SAME BITS: batches, losses, gradients, parameters, buffers and optimizer '
                  'state agree after every iteration']
    else:
        lines += ['', 'NOTHING WAS COMPARED']
    return '\n'.join(lines)


def _as_json(args: argparse.Namespace, results: Sequence[Result], notes: Sequence[str],
             same: bool) -> Dict[str, Any]:
    return dict(config=args.config, same=same, iterations=args.iters, level=args.level,
                notes=list(notes), work_dir=args.work_dir, variations=[
                    dict(name=result.name, title=result.title, equal=result.equal,
                         skipped=result.skipped or None,
                         difference=result.difference.as_dict() if result.difference else None)
                    for result in results])


def _load(args: argparse.Namespace, names: Sequence[str]) -> tuple:
    """The config, made small unless asked otherwise; and what was done to it."""
    cfg = Config.fromfile(args.config)
    cfg.merge_from_dict(args.cfg_options or {})
    notes = []
    if 'mmrepro' not in (cfg.get('custom_imports') or {}).get('imports', []):
        imports = cfg.get('custom_imports') or dict(imports=[])
        cfg.custom_imports = dict(imports=[*imports['imports'], 'mmrepro'],
                                  allow_failed_imports=False)
        notes.append('the config does not import mmrepro; here it does')
    if args.demo_data is not None:
        from ..demo import use_data, write_dataset
        write_dataset(args.demo_data)
        use_data(cfg, os.path.abspath(args.demo_data))
        notes.append(f'data: the demonstration data set in {args.demo_data}')
    phases = ('train', 'val') if 'validation' in names and cfg.get('val_cfg') else ('train', )
    reduction.check_data(cfg, phases)
    if 'val' in phases:
        reduction.few_images(cfg, 'val', reduction.VAL_IMAGES)
    if args.full:
        notes.append('as the config is (--full)')
    else:
        longest = reduction.shrink(cfg)
        reduction.few_images(cfg, 'train', reduction.IMAGES)
        notes.append(f'reduced: longest side {min(longest, reduction.LONGEST)} of {longest} '
                     f'pixels, {reduction.IMAGES} images, no pretrained weights '
                     '(--full: as the config is)')
    return cfg, notes


def _names(args: argparse.Namespace, parser: argparse.ArgumentParser) -> List[str]:
    names = list(VARIATIONS) if args.vary is None else [
        name.strip() for name in args.vary.split(',') if name.strip()]
    unknown = [name for name in names if name not in VARIATIONS]
    if unknown or not names:
        parser.error(f'--vary {args.vary}: {", ".join(unknown) or "nothing"} is not allowed; '
                     f'allowed: {",".join(VARIATIONS)}')
    for name in ('iters', 'jobs'):
        value = getattr(args, name)
        if value is not None and value < 1:
            parser.error(f'--{name} {value}: must be 1 or more')
    return list(dict.fromkeys(names))


def _has_gpu() -> bool:
    import torch
    return torch.cuda.is_available()


def _parser() -> Parser:
    parser = Parser(
        prog=program_name('verify'), description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog='variations:\n' + '\n'.join(
            f'  {name:<10}  {one.title}' for name, one in VARIATIONS.items())
        + '\n\nexample:\n  mmrepro verify configs/demo/faster-rcnn_r50_fpn_demo.py --demo-data')
    parser.add_argument('config', metavar='CONFIG')
    parser.add_argument('--iters', type=int, default=ITERATIONS, metavar='N',
                        help=f'iterations of each run (default: {ITERATIONS})')
    parser.add_argument('--vary', metavar='NAME,...',
                        help=f'what to vary (default: {",".join(VARIATIONS)})')
    parser.add_argument('--full', action='store_true',
                        help='images, batch and weights as in the config')
    parser.add_argument('--level', choices=('step', 'parameter', 'module'), default='step',
                        help='how much the fingerprints say (default: step)')
    parser.add_argument('--demo-data', nargs='?', const=DEMO_DATA, metavar='DIR',
                        help=f'train on the demonstration data set, written to DIR ({DEMO_DATA})')
    parser.add_argument('--cfg-options', nargs='+', action=Options, metavar='KEY=VALUE',
                        help='change settings of the config')
    parser.add_argument('--jobs', type=int, metavar='N',
                        help='runs at a time (default: 2 where there are cores for them, 1 on a '
                        'GPU)')
    parser.add_argument('--json', action='store_true', help='print the certificate as JSON')
    parser.add_argument('--localise', action='store_true',
                        help='when bits differ, go on and name the cause')
    parser.add_argument('--work-dir', default='work_dirs/verify', metavar='DIR',
                        help='for logs and fingerprints (default: work_dirs/verify)')
    return parser
