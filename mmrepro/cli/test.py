"""``mmrepro test``: MMDetection's tools/test.py, with arguments for reproducibility."""
from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..errors import DONE
from ..runs.config_edits import augment_test
from ..runs.startup import has_mmdet
from .arguments import SHARED, existing_checkpoint, finish, load, on_each_rank, training_parser


def main(argv: Sequence[str] | None = None) -> int:
    """Evaluate the checkpoint; 0: done, or with ``--image``: its predictions have the same bits."""
    parser = training_parser('test', 'Evaluate a detector.', checkpoint=True)
    parser.add_argument('--out', metavar='FILE.pkl', help='write the predictions to a pickle file')
    parser.add_argument('--show', action='store_true', help='show the predictions in a window')
    parser.add_argument('--show-dir', metavar='DIR',
                        help='draw the predictions into WORK_DIR/TIMESTAMP/DIR')
    parser.add_argument('--wait-time', type=float, default=2, metavar='SECONDS',
                        help='how long --show shows one image (default: 2)')
    parser.add_argument('--tta', action='store_true', help='test with augmented images')
    group = parser.add_argument_group('alone and in a batch (instead of an evaluation)')
    group.add_argument('--image', metavar='A', help='do the predictions for this image depend on '
                       'the others in its batch? No dataset is read')
    group.add_argument('--with', dest='others', nargs='+', metavar='B', help='the other images')
    group.add_argument('--score-thr', type=float, default=0.3, metavar='SCORE',
                       help='count detections from this score on (default: %(default)s)')
    group.add_argument('--json', **SHARED['json'])
    args = parser.parse_args(argv)
    if bool(args.image) != bool(args.others):
        parser.error('--image A --with B: give both')
    if args.image:
        parser.refuse(args, 'has no meaning with --image', 'out', 'show', 'show_dir', 'tta')
        for path in (args.image, *args.others):
            existing_checkpoint(path, 'image')
    else:
        parser.refuse(args, 'needs --image', 'json', 'score_thr')
    if args.out is not None:
        if not args.out.endswith(('.pkl', '.pickle')):
            parser.error(f'--out {args.out}: the name must end in .pkl or .pickle')
        parser.make_folder_of(args.out, '--out')
    if (args.show or args.show_dir) and not has_mmdet():
        parser.error("--show and --show-dir draw with MMDetection's hook; mmdet is not installed")
    cfg = load(args, parser)
    cfg.load_from = existing_checkpoint(args.checkpoint)
    if args.image:
        from ..localise.compare_modules import alone_and_in_batch
        return finish(alone_and_in_batch(cfg, args.checkpoint, args.image, args.others,
                                         args.score_thr), args)
    if args.show or args.show_dir:
        from mmdet.engine.hooks.utils import trigger_visualization_hook
        cfg = trigger_visualization_hook(cfg, args)
    if args.tta:
        augment_test(cfg)

    def test(runner: Any) -> None:
        if args.out is not None:
            if has_mmdet():
                from mmdet.evaluation import DumpDetResults as Dump
            else:
                from mmengine.evaluator import DumpResults as Dump
            runner.test_evaluator.metrics.append(Dump(out_file_path=args.out))
        runner.test()

    on_each_rank(cfg, parser, test)
    return DONE
