"""``mmrepro train``: MMDetection's tools/train.py, with arguments for reproducibility."""
from __future__ import annotations

from collections.abc import Sequence

from ..config import AUTO
from ..fingerprint.schema import LEVELS
from ..runs.config_edits import add_fingerprints, scale_learning_rate
from ..util.text import page
from .arguments import choice, existing_checkpoint, load, on_each_rank, training_parser


def main(argv: Sequence[str] | None = None) -> int:
    """Train the config; exit code 0: done."""
    parser = training_parser('train', 'Train a detector.')
    parser.add_argument('--amp', action='store_true', help='train with automatic mixed precision')
    parser.add_argument('--auto-scale-lr', action='store_true',
                        help="scale the learning rate with the batch size (config's auto_scale_lr)")
    parser.add_argument(
        '--resume', nargs='?', const=AUTO, metavar='CHECKPOINT',
        help='resume from this checkpoint; without a value, from the latest in the work directory, '
        "or, where there is none, begin as without it (with the config's load_from)")
    parser.add_argument(
        '--fingerprint', nargs='?', type=lambda text: choice(text, dict(zip(LEVELS, LEVELS))),
        const=LEVELS[0], metavar='|'.join(LEVELS),
        help='write digests of every iteration, for compare and localise; changes no bit of the '
        f"training (default of the level: step; see {page('reference/fingerprints.md')})")
    args = parser.parse_args(argv)
    cfg = load(args, parser)
    if args.amp:
        cfg.optim_wrapper.type = 'AmpOptimWrapper'
        cfg.optim_wrapper.loss_scale = 'dynamic'
    if args.auto_scale_lr:
        scale_learning_rate(cfg)
    if args.resume is not None:
        cfg.resume = AUTO
        if args.resume != AUTO:
            cfg.resume, cfg.load_from = True, existing_checkpoint(args.resume)
    if args.fingerprint is not None:
        add_fingerprints(cfg, args.fingerprint)
    on_each_rank(cfg, parser, lambda runner: runner.train())
    return 0
