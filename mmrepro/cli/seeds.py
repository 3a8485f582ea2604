"""``mmrepro seeds CONFIG --seeds 0..4``."""
from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence

from ..report.publish import publish
from ..reports import predictions, seeds
from ..runs.config_files import find_config, read_config
from .arguments import Parser, at_least, shared
from .outcome import finish


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
        'than the noise; with --same-within: they are the same), 1 it was not found or a training '
        'failed, 2 wrong usage',
        shared(json=None, work_dir=os.path.join('work_dirs', 'seeds'), cfg_options=None))
    parser.add_argument('config', nargs='?', help='path of a config, or package::path')
    parser.add_argument('--seeds', default='0..4', metavar='LIST',
                        help='0..4, or 0,1,5..7 (default: 0..4)')
    parser.add_argument('--compare', metavar='CONFIG', nargs='+', default=[],
                        help='further configs, the same seeds')
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
    parser.add_argument('--report-only', action='store_true', help='train nothing')
    parser.add_argument('--no-plots', action='store_true', help='write no plot and no HTML report')
    group = parser.add_argument_group('saved predictions, instead of a config')
    group.add_argument('--predictions', metavar='FILES', nargs='+',
                       help='of one or more detectors: FILE.pkl of test --out, or COCO\'s JSON; '
                       'files of several seeds are separated by commas, or DIR has '
                       'seed_N/predictions.pkl; LABEL=FILES names a detector')
    group.add_argument('--annotations', metavar='FILE', help='that they were tested on')
    group.add_argument('--iou-type', choices=('bbox', 'segm'), default='bbox',
                       help='boxes or masks (default: bbox)')
    group.add_argument('--resamples', type=at_least(100), default=1000, metavar='N',
                       help='resamples of the images (default: 1000)')
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Report, after training what is missing; 1: what was asked for was not found."""
    parser = _parser()
    args = parser.parse_args(argv)
    if (args.config is None) == (args.predictions is None):
        parser.error('give a config, or --predictions')
    if (args.predictions is None) != (args.annotations is None):
        parser.error('--predictions and --annotations need each other')
    if args.vary:
        parser.refuse(args, 'and --vary exclude each other', 'compare', 'same_within', 'plan')
    if args.predictions:
        parser.refuse(args, 'and --predictions exclude each other', 'vary', 'compare', 'plan')
        report = predictions(
            args.predictions, args.annotations, iou_type=args.iou_type, say=_say,
            metric=args.metric or 'mAP', same_within=args.same_within, resamples=args.resamples)
    else:
        report = seeds(
            args.config, args.seeds, compare=args.compare, vary=args.vary, metric=args.metric,
            pick=args.pick, same_within=args.same_within, plan=args.plan,
            options=args.options_as_given, work_dir=args.work_dir, report_only=args.report_only,
            say=_say)
    written = [] if args.no_plots else list(report.write(args.work_dir, 'seeds').values())
    if args.config is not None and not args.no_plots:
        cfg = read_config(find_config(args.config), args.cfg_options, imports=False)
        written += [f'scalars and the plot to {name}'
                    for name in publish(cfg, args.work_dir, 'mmrepro/seeds', report)]
    report.data['written'] = written
    code = finish(report, args)
    if args.json != '-':
        for path in written:
            print(f'wrote {path}')
    return code


def _say(text: str) -> None:
    print(f'[{time.strftime("%H:%M:%S")}] {text}', file=sys.stderr, flush=True)
