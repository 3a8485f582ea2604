"""``mmrepro audit CONFIG``."""
from __future__ import annotations

from collections.abc import Sequence

from ..audit.rules import RULES
from ..errors import DONE
from ..verbs import audit
from .arguments import Parser, finish, shared


def main(argv: Sequence[str] | None = None) -> int:
    """Audit a config; 0: nothing changes bits; 1: something does, or with `--strict` may."""
    parser = Parser(
        'audit', 'Look for what would make two runs of a config differ. Nothing is trained: '
        'the config, the types that it names, your own source files and the environment are '
        'read.',
        'example:\n  %(prog)s configs/faster-rcnn_r50_fpn_1x_coco_repro.py --device cuda\n'
        '  %(prog)s mmdet::rtmdet/rtmdet_tiny_8xb32-300e_coco.py\n\n'
        'exit code: 0 nothing changes bits, 1 something does (with --strict: or may), '
        '2 wrong usage',
        shared(json=None, cfg_options=None))
    parser.add_argument('config', nargs='?', help='path of a config, or package::path')
    parser.add_argument('--device', choices=('cpu', 'cuda'),
                        help='where it would train (default: cuda if there is one)')
    parser.add_argument('--ignore', nargs='+', metavar='RULE', default=(),
                        help='leave these rules out')
    parser.add_argument('--strict', action='store_true',
                        help='exit with code 1 if something may change bits, too')
    parser.add_argument('--rules', action='store_true', help='list the rules, and stop')
    args = parser.parse_args(argv)
    if args.rules:
        for rule in RULES:
            print(f'{rule.name:<22} {rule.severity:<16} {rule.why}')
        return DONE
    if args.config is None:
        parser.error('give a config, for example mmdet::retinanet/retinanet_r50_fpn_1x_coco.py')
    return finish(audit(args.config, device=args.device, ignore=args.ignore,
                        options=args.cfg_options, strict=args.strict), args)
