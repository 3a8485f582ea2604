"""``mmrepro test``: MMDetection's tools/test.py, with arguments for reproducibility."""
from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..runs.config_edits import augment_test
from ..runs.startup import has_mmdet
from .arguments import existing_checkpoint
from .training_arguments import load, on_each_rank, training_parser


def main(argv: Sequence[str] | None = None) -> int:
    """Evaluate the checkpoint; exit code 0: done."""
    parser = training_parser('test', 'Evaluate a detector.', checkpoint=True)
    parser.add_argument('--out', metavar='FILE.pkl', help='write the predictions to a pickle file')
    parser.add_argument('--show', action='store_true', help='show the predictions in a window')
    parser.add_argument('--show-dir', metavar='DIR',
                        help='draw the predictions into WORK_DIR/TIMESTAMP/DIR')
    parser.add_argument('--wait-time', type=float, default=2, metavar='SECONDS',
                        help='how long --show shows one image (default: 2)')
    parser.add_argument('--tta', action='store_true', help='test with augmented images')
    args = parser.parse_args(argv)
    if args.out is not None and not args.out.endswith(('.pkl', '.pickle')):
        parser.error(f'--out {args.out}: the name must end in .pkl or .pickle')
    if args.out is not None:
        parser.make_folder_of(args.out, '--out')
    if (args.show or args.show_dir) and not has_mmdet():
        parser.error("--show and --show-dir draw with MMDetection's hook; mmdet is not installed")
    cfg = load(args, parser)
    cfg.load_from = existing_checkpoint(args.checkpoint)
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
    return 0
