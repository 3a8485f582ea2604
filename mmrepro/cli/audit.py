"""``mmrepro audit CONFIG``."""
from __future__ import annotations

import argparse
import contextlib
import json
import sys
from collections.abc import Sequence

from ..audit.auditing import audit, exit_code, load, report, summary
from ..audit.findings import AuditFinding
from ..audit.rules import RULES
from ..audit.subject import Subject
from ..errors import AuditError
from . import program_name
from .arguments import Parser, quiet_when_reader_leaves

# how else a config that does not attach mmrepro could be trained: in the report, and as a subject
OTHERS = {
    'with_mmrepro_train': ('under mmrepro train, which attaches itself', Subject.under_our_train),
    'with_two_lines': ('with the two lines of mmrepro', Subject.with_two_lines),
}


@quiet_when_reader_leaves
def main(argv: Sequence[str] | None = None) -> int:
    """Audit a config; 0: nothing changes bits, 1: something does, 2: it cannot be audited."""
    args = _parser().parse_args(argv)
    import torch
    from rich.console import Console
    if args.rules:
        for rule in RULES:
            print(f'{rule.name:<22} {rule.severity:<16} {rule.why}')
        return 0
    try:
        if args.config is None:
            raise AuditError('give a config, for example mmdet::retinanet/'
                             'retinanet_r50_fpn_1x_coco.py')
        # constructors may print
        with contextlib.redirect_stdout(sys.stderr):
            device = args.device or ('cuda' if torch.cuda.is_available() else 'cpu')
            subject = load(args.config, device, options=args.cfg_options)
            findings = audit(subject, args.ignore or ())
            others = {} if subject.attached else {
                name: audit(attached(subject), args.ignore or ())
                for name, (_, attached) in OTHERS.items()}
    except AuditError as error:
        print(f'{program_name("audit")}: {error}', file=sys.stderr)
        return 2
    code = exit_code(findings)
    if args.json:
        print(json.dumps(dict(config=args.config, device=subject.device, exit_code=code,
                              attached=subject.attached,
                              **{name: _dicts(others[name]) if others else None
                                 for name in OTHERS}, findings=_dicts(findings)), indent=2))
        return code
    console = Console(highlight=False, soft_wrap=True)
    report(findings, console)
    verdict = 'NOT REPRODUCIBLE' if code else 'NO CAUSE FOUND THAT CHANGES BITS'
    if code and not subject.attached:
        verdict += " under MMDetection's own tools/train.py"
    console.print(f'\n{verdict}: {summary(findings)} ({args.config}, {subject.device}, '
                  f'torch {".".join(map(str, subject.torch_version))})')
    for name, rest in others.items():
        rules = ', '.join(dict.fromkeys(finding.rule for finding in rest))
        console.print(f'{OTHERS[name][0]}: {summary(rest)}{f" ({rules})" if rules else ""}')
    return code


def _dicts(findings: Sequence[AuditFinding]) -> list[dict[str, str]]:
    return [finding.as_dict() for finding in findings]


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        'audit',
        description='Look for what would make two runs of a config differ. Nothing is trained: '
        'the config, the types that it names, your own source files, the model (built without '
        'memory) and the environment are read.',
        epilog='example:\n  %(prog)s configs/faster-rcnn_r50_fpn_1x_coco_repro.py --device cuda\n'
        '  %(prog)s mmdet::rtmdet/rtmdet_tiny_8xb32-300e_coco.py\n\n'
        'exit code: 0 nothing changes bits, 1 something does, 2 wrong usage')
    parser.add_argument('config', nargs='?', help='path of a config, or package::path')
    parser.add_argument('--device', choices=('cpu', 'cuda'),
                        help='where it would train (default: cuda if there is one)')
    parser.add_argument('--ignore', nargs='+', metavar='RULE', help='leave these rules out')
    parser.add_argument('--rules', action='store_true', help='list the rules, and stop')
    parser.add_argument('--json', action='store_true', help='write JSON to the standard output')
    parser.add_config_options('change settings of the config, as in train')
    return parser
