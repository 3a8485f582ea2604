"""``mmrepro seeds CONFIG --seeds 0..4``."""
from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence

from ..verbs import seeds
from .arguments import Parser, finish, shared


def _parser() -> Parser:
    parser = Parser(
        'seeds', 'Train a config with several seeds, each in a fresh process, and report the '
        'spread of a metric. With --compare, train other configs with the same seeds and test '
        'whether they differ by more than the noise of the seed. With --vary, say which stream of '
        'random numbers moves the metric. Stop it at any time: finished seeds are not trained '
        'again, interrupted seeds are resumed.',
        'example:\n  %(prog)s configs/demo/retinanet_r50_fpn_demo.py --seeds 0..5 '
        '--metric coco/bbox_mAP\n  %(prog)s base.py --seeds 0..5 --compare mine.py '
        '--work-dir work_dirs/study\n  %(prog)s base.py --seeds 0..9 --vary init,sampler,sample,'
        'step\n\nexit code: 0 done (with --compare: there is a difference larger than the noise), '
        '1 it was not found or a training failed, 2 wrong usage',
        shared(json=None, work_dir=os.path.join('work_dirs', 'seeds'), cfg_options=None))
    parser.add_argument('config', help='path of a config, or package::path')
    parser.add_argument('--seeds', default='0..4', metavar='LIST',
                        help='0..4, or 0,1,5..7 (default: 0..4)')
    parser.add_argument('--compare', metavar='CONFIG', nargs='+', default=[],
                        help='further configs, the same seeds')
    parser.add_argument('--vary', metavar='STREAMS',
                        help='vary one of these streams at a time (init,sampler,sample,step), and '
                        'all together: which share of the variance is whose?')
    parser.add_argument('--metric', help='name of the metric (default: the mAP of COCO or VOC, '
                        'else the first)')
    parser.add_argument('--pick', choices=('last', 'best'), default='last',
                        help='which validation of a run counts (default: last): best is that with '
                        'the largest value, which flatters')
    parser.add_argument('--report-only', action='store_true', help='train nothing')
    parser.add_argument('--no-plots', action='store_true', help='write no plot and no HTML report')
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Train missing runs and report; 1: no significant difference, or a failed run."""
    parser = _parser()
    args = parser.parse_args(argv)
    if args.vary:
        parser.refuse(args, 'and --vary exclude each other', 'compare')
    parser.make_folder(args.work_dir)
    report = seeds(
        args.config, args.seeds, compare=args.compare, vary=args.vary, metric=args.metric,
        pick=args.pick, options=args.options_as_given, work_dir=args.work_dir,
        report_only=args.report_only, on_progress=_on_progress)
    report.data['written'] = {} if args.no_plots else report.write(args.work_dir, 'seeds')
    return finish(report, args)


def _on_progress(text: str) -> None:
    print(f'[{time.strftime("%H:%M:%S")}] {text}', file=sys.stderr, flush=True)
