"""``mmrepro data``: write the demonstration dataset."""
from __future__ import annotations

from collections.abc import Sequence

from ..demo.dataset import refusal, write_dataset
from .arguments import Parser

# argument, least and most. Seeds as those of a training; a million images is a typing error
LIMITS = (('seed', 0, 2**32 - 1), ('train', 1, 1_000_000), ('val', 1, 1_000_000))


def main(argv: Sequence[str] | None = None) -> int:
    """Write the dataset, print where it is and its digest."""
    parser = Parser('data', 'Write a small COCO-format detection dataset made of real photographs.',
                    'example:\n  mmrepro data data/demo')
    parser.add_argument('out', help='folder to write to')
    parser.add_argument('--seed', type=int, default=0, help='another seed, other images')
    parser.add_argument('--train', type=int, default=24, metavar='N', help='training images')
    parser.add_argument('--val', type=int, default=8, metavar='N', help='validation images')
    args = parser.parse_args(argv)
    for name, low, high in LIMITS:
        value = getattr(args, name)
        if not low <= value <= high:
            parser.error(f'--{name} {value}: must be {low} to {high}')
    try:
        digest = write_dataset(args.out, args.seed, args.train, args.val)
    except (OSError, ModuleNotFoundError) as error:
        parser.error(refusal(error, args.out))
    print(f'{args.out}: {args.train} training and {args.val} validation images, digest {digest}')
    return 0
