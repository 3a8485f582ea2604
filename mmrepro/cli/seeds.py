"""``mmrepro seeds CONFIG --seeds 0..4``."""
from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from typing import Any

from ..errors import MissingPackageError, SeedsError
from ..exit_codes import DIFFERENT, DONE, USAGE
from ..report import seeds_report, variance
from ..report.coco import bootstrap, detectors
from ..report.coco import view as coco_view
from ..report.publish import publish, write_files
from ..report.seed_study import choose_metric, metrics_of, study, value_of
from ..report.terminal import console
from ..runs.config_files import find_config, read_config
from ..runs.seed_runs import SeedJob, jobs_of, parse_seeds, parse_streams, result_of, run_job, vary
from ..text import duration
from .arguments import OptionsAsGiven, Parser, quiet_when_reader_leaves


def _parser() -> Parser:
    parser = Parser(
        'seeds', 'Train a config with several seeds, each in a fresh process, and report the '
        'spread of a metric. With --compare, train other configs with the same seeds and test '
        'whether they differ by more than the noise of the seed. With --vary, say which stream of '
        'random numbers moves the metric. With --predictions, train nothing: say how far the '
        'figures of COCO depend on the images that were tested. Stop it at any time: what is '
        'finished is not trained again, what is not is resumed.',
        'example:\n  %(prog)s configs/demo/retinanet_r50_fpn_demo.py --seeds 0..5 '
        '--metric coco/bbox_mAP\n  %(prog)s base.py --seeds 0..5 --compare mine.py '
        '--work-dir work_dirs/study\n  %(prog)s base.py --seeds 0..9 --vary init,sampler,sample,'
        'step\n  %(prog)s --predictions base.pkl mine.pkl --annotations instances_val2017.json\n\n'
        'exit code: 0 done (with --compare or several --predictions: there is a difference larger '
        'than the noise; with --same-within: they are the same), 1 it was not found, 2 wrong usage '
        'or a failed training')
    parser.add_argument('config', nargs='?', help='path of a config, or package::path')
    parser.add_argument('--seeds', default='0..4', metavar='LIST',
                        help='0..4, or 0,1,5..7 (default: 0..4)')
    parser.add_argument('--compare', metavar='CONFIG', nargs='+', default=[],
                        help='other configs, the same seeds')
    parser.add_argument('--vary', metavar='STREAMS',
                        help='vary one of these streams at a time (init,sampler,sample,step), and '
                        'all together: which share of the variance is whose?')
    parser.add_argument('--metric', help='name of the metric (default: coco/bbox_mAP if there is '
                        'one, else the first; mAP of --predictions)')
    parser.add_argument('--pick', choices=('last', 'best'), default='last',
                        help='which validation of a run counts (default: last; best flatters)')
    parser.add_argument('--same-within', type=float, metavar='M', help='also test whether the '
                        'others are the same as the first within M, in units of the metric '
                        '(0.002 for 0.2 points of mAP)')
    parser.add_argument('--plan', type=float, metavar='D', help='from these runs as a pilot, how '
                        'many seeds it takes to see a difference of D, in units of the metric')
    parser.add_argument('--work-dir', default=os.path.join('work_dirs', 'seeds'), metavar='DIR',
                        help='where runs and the report go (default: work_dirs/seeds)')
    parser.add_argument('--report-only', action='store_true', help='train nothing')
    parser.add_argument('--no-plots', action='store_true', help='write no plot and no HTML report')
    parser.add_argument('--json', action='store_true', help='write JSON to the standard output')
    parser.add_config_options('change settings of all configs, as in train', OptionsAsGiven)
    group = parser.add_argument_group('saved predictions, instead of a config')
    group.add_argument('--predictions', metavar='FILES', nargs='+',
                       help='of one or more detectors: FILE.pkl of test --out, or COCO\'s JSON; '
                       'files of several seeds are separated by commas, or DIR has '
                       'seed_N/predictions.pkl; LABEL=FILES names a detector')
    group.add_argument('--annotations', metavar='FILE', help='that they were tested on')
    group.add_argument('--iou-type', choices=('bbox', 'segm'), default='bbox',
                       help='boxes or masks (default: bbox)')
    parser.add_number('--resamples', 1000, 'N', 'of the images')
    parser.set_defaults(options_as_given=())
    return parser


@quiet_when_reader_leaves
def main(argv: Sequence[str] | None = None) -> int:
    """Report, after training what is missing; 0: done, and found what was asked for; 1: it was not
    found, 2: wrong usage or a failed training."""
    parser = _parser()
    args = parser.parse_args(argv)
    _check(args, parser)
    try:
        view, found = _of_images(args) if args.predictions else _of_trainings(args)
        written = [] if args.no_plots else _write(args, view, found)
    # SeedsError, PredictionError and AuditError are ValueErrors
    except (ValueError, MissingPackageError, OSError) as error:
        print(f'{parser.prog}: {error}', file=sys.stderr)
        return USAGE
    code = DIFFERENT if found.answer is False else DONE
    if args.json:
        print(json.dumps(dict(exit_code=code, written=written, **found.as_dict()), indent=2))
        return code
    view.show(found, console())
    for path in written:
        print(f'wrote {path}')
    return code


def _check(args: argparse.Namespace, parser: Parser) -> None:
    """Refuse what does not go together."""
    if (args.config is None) == (args.predictions is None):
        parser.error('give a config, or --predictions')
    if (args.predictions is None) != (args.annotations is None):
        parser.error('--predictions and --annotations need each other')
    for one, others in (('vary', ('compare', 'same_within', 'plan', 'predictions')),
                        ('predictions', ('compare', 'plan'))):
        for other in others:
            if getattr(args, one) and getattr(args, other):
                parser.error(f'--{one} and --{other.replace("_", "-")} exclude each other')


def _of_images(args: argparse.Namespace) -> tuple[Any, bootstrap.ImageStudy]:
    found = detectors.load(args.predictions, args.annotations, args.iou_type, _say)
    return coco_view, bootstrap.study(found, args.resamples, args.metric or 'mAP',
                                      args.same_within, _say)


def _of_trainings(args: argparse.Namespace) -> tuple[Any, Any]:
    seeds = parse_seeds(args.seeds)
    paths = [find_config(path) for path in (args.config, *args.compare)]
    labels = [os.path.splitext(os.path.basename(path))[0] for path in paths]
    double = next((label for label in labels if labels.count(label) > 1), None)
    if double is not None:
        raise SeedsError(f'two configs are called {double}; rename one of them')
    changes = args.cfg_options or {}
    jobs = {label: jobs_of(path, label, seeds, args.work_dir, args.options_as_given, changes)
            for path, label in zip(paths, labels)}
    if args.vary:
        whole = jobs.pop(labels[0])
        jobs = {variance.ALL: whole, **{stream: vary(whole[0], stream, seeds)
                                        for stream in parse_streams(args.vary, paths[0], changes)}}
        if len(seeds) < variance.MIN_SEEDS:  # before hours of training
            raise SeedsError(f'--vary needs at least {variance.MIN_SEEDS} seeds, and --seeds '
                             f'{args.seeds} has {len(seeds)}')
    # the first run of every stream is the same one
    results = _results(list(dict.fromkeys(sum(jobs.values(), []))), args.report_only)
    metric = choose_metric(list(results.values()), args.metric)
    values = {name: [value_of(results[job], metric, args.pick) for job in of_it]
              for name, of_it in jobs.items()}
    if args.vary:
        return variance, variance.study(metric, args.pick, labels[0], seeds, values)
    return seeds_report, study(metric, args.pick, seeds, values, args.same_within, args.plan)


def _results(jobs: list[SeedJob], report_only: bool) -> dict[SeedJob, dict[str, Any]]:
    """Results of all jobs; trains those that have none."""
    results = {job: result_of(job) for job in jobs}  # all of them first: another config is an error
    todo = [job for job in jobs if results[job] is None]
    if todo and report_only:
        raise SeedsError('--report-only, and these are not finished: '
                         + ', '.join(job.name for job in todo))
    done = len(jobs) - len(todo)
    if done:
        _say(f'{done} of {len(jobs)} runs are there already')
    took: list[float] = []
    for number, job in enumerate(todo, 1):
        left = f', about {duration(sum(took) / len(took) * (len(todo) - number + 1))} left' \
            if took else ''
        _say(f'run {number} of {len(todo)}: {job.name}{left} '
             f'(log: {os.path.join(job.folder, "seed.log")})')
        start = time.monotonic()
        results[job] = run_job(job, metrics_of)
        took.append(time.monotonic() - start)
    return results


def _say(text: str) -> None:
    print(f'[{time.strftime("%H:%M:%S")}] {text}', file=sys.stderr, flush=True)


def _write(args: argparse.Namespace, view: Any, found: Any) -> list[str]:
    drawn = view.plot(found)
    written = write_files(args.work_dir, {
        'seeds.png': drawn, 'seeds.html': view.report(found, drawn).encode(),
        'seeds.json': json.dumps(found.as_dict(), indent=1).encode()})
    if args.config is None:
        return written
    cfg = read_config(find_config(args.config), args.cfg_options, imports=False)
    backends = publish(cfg, args.work_dir, 'mmrepro/seeds', view.scalars(found), {'plot': drawn})
    return written + [f'scalars and the plot to {name}' for name in backends]
