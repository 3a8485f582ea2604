"""``mmrepro seeds CONFIG --seeds 0..4``."""
from __future__ import annotations

import argparse
import json
import os
import sys
import time
from typing import Any, Dict, List, Optional, Sequence

from mmengine.config import Config

from ..audit.auditing import find_config
from ..exit_codes import DIFFERENT, DONE, USAGE
from ..report import seeds_report
from ..report.plot_style import MissingPlots
from ..report.publish import publish, write_files
from ..report.seed_runs import (
    SeedJob,
    SeedsError,
    choose_metric,
    jobs_of,
    parse_seeds,
    result_of,
    run_job,
    value_of,
)
from ..report.stats import MissingStatistics
from ..report.terminal import console
from .arguments import Options, Parser, quiet_when_reader_leaves

__all__ = ['main']


class _Options(Options):
    """As in `train`, and keeps the words, which the trainings get as they are."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option: Any = None) -> None:
        namespace.options_as_given = tuple(values)
        super().__call__(parser, namespace, list(values), option)


@quiet_when_reader_leaves
def main(argv: Optional[Sequence[str]] = None) -> int:
    """Train seeds and report; 0: done (and, with --compare, B differs by more than noise), 1: it
    does not, 2: wrong usage or a failed training."""
    parser = Parser(
        'seeds', 'Train a config with several seeds, each in a fresh process, and report the '
        'spread of a metric. With --compare, train another config with the same seeds and test '
        'whether it is better by more than the noise of the seed. Stop it at any time: what is '
        'finished is not trained again, what is not is resumed.',
        'example:\n  %(prog)s configs/demo/retinanet_r50_fpn_demo.py --seeds 0..5 '
        '--metric coco/bbox_mAP\n  %(prog)s base.py --seeds 0..5 --compare mine.py '
        '--work-dir work_dirs/study\n\nexit code: 0 done (with --compare: B differs by more than '
        'the noise), 1 it does not, 2 wrong usage or a failed training')
    parser.add_argument('config', help='path of a config, or package::path')
    parser.add_argument('--seeds', default='0..4', metavar='LIST',
                        help='0..4, or 0,1,5..7 (default: 0..4)')
    parser.add_argument('--compare', metavar='CONFIG_B', help='another config, the same seeds')
    parser.add_argument('--metric', help='name of the metric (default: coco/bbox_mAP if there is '
                        'one, else the first)')
    parser.add_argument('--pick', choices=('last', 'best'), default='last',
                        help='which validation of a run counts (default: last; best flatters)')
    parser.add_argument('--work-dir', default=os.path.join('work_dirs', 'seeds'), metavar='DIR',
                        help='where runs and the report go (default: work_dirs/seeds)')
    parser.add_argument('--report-only', action='store_true', help='train nothing')
    parser.add_argument('--no-plots', action='store_true', help='write no plot and no HTML report')
    parser.add_argument('--json', action='store_true', help='write JSON to the standard output')
    parser.add_config_options('change settings of both configs, as in train', _Options)
    parser.set_defaults(options_as_given=())
    args = parser.parse_args(argv)
    try:
        seeds = parse_seeds(args.seeds)
        paths = [find_config(path) for path in (args.config, args.compare) if path is not None]
        labels = [os.path.splitext(os.path.basename(path))[0] for path in paths]
        if len(set(labels)) < len(labels):
            raise SeedsError(f'both configs are called {labels[0]}; rename one of them')
        jobs = [job for path, label in zip(paths, labels) for job in jobs_of(
            path, label, seeds, args.work_dir, args.options_as_given, args.cfg_options or {})]
        results = _results(jobs, args.report_only)
        metric = choose_metric([results[job] for job in jobs], args.metric)
        values: Dict[str, List[float]] = {}
        for job in jobs:
            values.setdefault(job.label, []).append(value_of(results[job], metric, args.pick))
        found = seeds_report.study(metric, args.pick, seeds, values)
        written = [] if args.no_plots else _write(args, found)
    # SeedsError and AuditError are ValueErrors
    except (ValueError, MissingPlots, MissingStatistics, OSError) as error:
        print(f'{parser.prog}: {error}', file=sys.stderr)
        return USAGE
    except KeyboardInterrupt:
        _say('stopped; the same command continues')
        return USAGE
    code = DIFFERENT if found.test is not None and not found.test.larger else DONE
    if args.json:
        print(json.dumps(dict(exit_code=code, written=written, **found.as_dict()), indent=2))
        return code
    seeds_report.show(found, console())
    for path in written:
        print(f'wrote {path}')
    return code


def _results(jobs: List[SeedJob], report_only: bool) -> Dict[SeedJob, Dict[str, Any]]:
    """Results of all jobs; trains those that have none."""
    results = {job: result_of(job) for job in jobs}  # all of them first: another config is an error
    todo = [job for job in jobs if results[job] is None]
    if todo and report_only:
        raise SeedsError('--report-only, and these are not finished: '
                         + ', '.join(f'{job.label} seed {job.seed}' for job in todo))
    done = len(jobs) - len(todo)
    if done:
        _say(f'{done} of {len(jobs)} runs are there already')
    took: List[float] = []
    for number, job in enumerate(todo, 1):
        left = f', about {_minutes(sum(took) / len(took) * (len(todo) - number + 1))} left' \
            if took else ''
        _say(f'run {number} of {len(todo)}: {job.label}, seed {job.seed}{left} '
             f'(log: {os.path.join(job.folder, "seed.log")})')
        start = time.monotonic()
        results[job] = run_job(job)
        took.append(time.monotonic() - start)
    return results


def _minutes(seconds: float) -> str:
    if seconds < 90:
        return f'{seconds:.0f} s'
    return f'{seconds / 60:.0f} min' if seconds < 5400 else f'{seconds / 3600:.1f} h'


def _say(text: str) -> None:
    print(f'[{time.strftime("%H:%M:%S")}] {text}', file=sys.stderr, flush=True)


def _write(args: argparse.Namespace, found: seeds_report.Study) -> List[str]:
    drawn = seeds_report.plot(found)
    written = write_files(args.work_dir, {
        'seeds.png': drawn, 'seeds.html': seeds_report.report(found, drawn).encode(),
        'seeds.json': json.dumps(found.as_dict(), indent=1).encode()})
    cfg = Config.fromfile(find_config(args.config), import_custom_modules=False)
    cfg.merge_from_dict(args.cfg_options or {})
    backends = publish(cfg, args.work_dir, 'mmrepro/seeds', seeds_report.scalars(found),
                       {'plot': drawn})
    return written + [f'scalars and the plot to {name}' for name in backends]
