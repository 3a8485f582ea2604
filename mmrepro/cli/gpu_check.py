"""``python tools/gpu_check.py --out DIR [--device cuda|cpu] [--quick]``"""
from __future__ import annotations

import argparse
import gc
import os
import re
import sys
import time
import traceback
from typing import Any, Callable, Dict, List, Optional, Sequence

__all__ = ['main']

# Share of the time for operators; detectors get what is left.
_OPERATORS = 0.35
# Pixels of pictures: about those of a usual schedule on a GPU, few where every second counts.
_SIZE, _QUICK_SIZE = 640, 128
_GROUPS = ('mmcv', 'triton', 'torch', 'detectors')


def _parse(arguments: Optional[Sequence[str]]) -> argparse.Namespace:
    from . import program_name
    from .arguments import Parser
    name = program_name('gpu_check')
    parser = Parser(
        prog=name, formatter_class=argparse.RawDescriptionHelpFormatter,
        description='Find out whether training repeats bit for bit on this device, operator by\n'
        'operator and detector by detector, and what it costs.',
        epilog=f'example:\n  {name} --out DIR --only detectors/DINO')
    parser.add_argument('--out', required=True, help='folder for gpu_check.json and gpu_check.md')
    parser.add_argument('--device', choices=('cuda', 'cpu'), default='cuda')
    parser.add_argument('--quick', action='store_true',
                        help='small inputs, few repetitions, two iterations')
    parser.add_argument('--seconds', type=float, default=450., help='limit of time (450)')
    parser.add_argument('--only', default='', metavar='REGEX',
                        help='rows whose "group/name" matches, e.g. "detectors/DINO"')
    parser.add_argument('--iterations', type=int, default=None, help='of a detector (20; quick: 2)')
    parser.add_argument('--size', type=int, default=None, help='pixels of a picture')
    return parser.parse_args(arguments)


def _row(run: Callable[[], Dict[str, Any]], budget: Any, device: str) -> Dict[str, Any]:
    """One row; a crash is recorded and does not end the check."""
    if not budget.allows():
        return dict(left_out='no time left')
    start = time.monotonic()
    try:
        row = run()
    except Exception as error:  # noqa: BLE001  whatever a row raises is its result
        text = str(error).strip()
        row = dict(error_text=f'{type(error).__name__}: {text.splitlines()[0] if text else ""}',
                   traceback=[line.strip() for line in traceback.format_tb(error.__traceback__)[-3:]
                              for line in line.strip().splitlines()[1:]])
        del error
    gc.collect()
    if device == 'cuda':
        import torch
        torch.cuda.empty_cache()
    row['seconds'] = round(time.monotonic() - start, 1)
    budget.spent(row['seconds'])
    return row


def _operators(args: argparse.Namespace, result: Dict[str, Any], budget: Any, compiled: bool
               ) -> None:
    from ..gpu_check import cases_mmcv, cases_torch, operator_check
    part = budget.part(_OPERATORS)
    times, seconds = (4, .2) if args.quick else (50, 1.5)
    kernel = 'compiled' if compiled else None
    groups = {'mmcv': (cases_mmcv.CASES, 'torch', kernel),
              'triton': (_with_kernels(args.device), 'triton', kernel or 'torch'),
              'torch': (cases_torch.CASES, 'torch', 'flags')}
    for group, (cases, provider, against) in groups.items():
        for name, case in cases.items():
            if re.search(args.only, f'{group}/{name}'):
                result[group][name] = _row(
                    lambda case=case, provider=provider, against=against: operator_check.check(
                        case, args.device, args.quick, times, seconds, provider, against),
                    part, args.device)
                _tell(args, result, group, name)


def _with_kernels(device: str) -> Dict[str, Any]:
    """Rows of mmcv's operators that have a kernel in Triton, where that can run."""
    from ..gpu_check import cases_mmcv
    from ..ops import triton
    if triton.requirement() or not triton.runs_on(device):
        return {}
    return {name: case for name, case in cases_mmcv.CASES.items()
            if any(operator in triton.FUSED for operator in case.covers)}


def _detectors(args: argparse.Namespace, result: Dict[str, Any], budget: Any, compiled: bool
               ) -> None:
    from ..gpu_check import detectors
    size = args.size or (_QUICK_SIZE if args.quick else _SIZE)
    iterations = args.iterations or (2 if args.quick else 20)
    for name, detector in detectors.DETECTORS.items():
        if re.search(args.only, f'detectors/{name}'):
            result['detectors'][name] = _row(lambda detector=detector: detectors.check(
                detector, args.device, size, iterations, args.quick or args.device == 'cpu',
                compiled, budget.allows), budget, args.device)
            _tell(args, result, 'detectors', name)


def _tell(args: argparse.Namespace, result: Dict[str, Any], group: str, name: str) -> None:
    """Print a row and write all so far: a check that is cut short has not been for nothing."""
    from ..gpu_check import check_report
    row = result[group][name]
    print(f'{group:9} {name:30} {row.get("seconds", 0.):6.1f} s  {check_report.verdict(row)}',
          flush=True)
    result['summary'] = _summary(result)
    check_report.write(result, args.out)


def _summary(result: Dict[str, Any]) -> Dict[str, Any]:
    rows = [row for group in _GROUPS for row in result[group].values()]
    judged = [row for row in rows if 'equal' in row]
    good = [row for row in judged if row['equal'] and row.get('agrees', True)
            and row.get('finite', True)]
    return dict(equal=len(good), unequal=len(judged) - len(good),
                failed=sum('error_text' in row for row in rows),
                left_out=sum('left_out' in row for row in rows),
                seconds=round(sum(row.get('seconds', 0.) for row in rows), 1))


def main(arguments: Optional[Sequence[str]] = None) -> int:
    """Run the check. Returns 0 if every row gave equal bits, 1 if one did not or failed, 2 for a
    device that is not there."""
    args = _parse(arguments)
    from ..gpu_check.budget import Budget
    budget = Budget(args.seconds)
    import torch
    if args.device == 'cuda' and not torch.cuda.is_available():
        print('gpu_check: this torch sees no CUDA device; --device cpu runs the same code on the '
              'processor', file=sys.stderr)
        return 2
    from .. import ops
    from ..gpu_check import check_report, hardware, operator_check, stubs
    # Before CUDA starts, because cuBLAS reads it once; it stays set in the runs by default.
    os.environ.setdefault('CUBLAS_WORKSPACE_CONFIG', ':4096:8')
    missing = stubs.install()
    ops.install()
    result: Dict[str, Any] = dict(
        command=' '.join(['gpu_check', *_public(arguments)]),
        machine=hardware.describe(args.device),
        stand_ins=list(missing), summary={}, **{group: {} for group in _GROUPS})
    result['summary'] = _summary(result)
    compiled = operator_check.has_compiled_kernels()
    from mmdet.utils import register_all_modules
    from mmengine.logging import MMLogger
    register_all_modules(init_default_scope=True)
    MMLogger.get_instance('mmengine', log_level='ERROR')  # else a line per initialised weight
    for part in (_operators, _detectors):
        part(args, result, budget, compiled)
    print('\n'.join(map(str, check_report.write(result, args.out))))
    return 1 if result['summary']['unequal'] or result['summary']['failed'] else 0


def _public(arguments: Optional[Sequence[str]]) -> List[str]:
    """The arguments without the folder, which is nobody's business."""
    shown = list(sys.argv[1:] if arguments is None else arguments)
    for i, text in enumerate(shown):
        if text == '--out' and i + 1 < len(shown):
            shown[i + 1] = 'DIR'
        elif text.startswith('--out='):
            shown[i] = '--out=DIR'
    return shown
