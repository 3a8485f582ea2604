"""``mmrepro doctor``: the environment, its packages, mmcv's operators."""
from __future__ import annotations

from collections.abc import Sequence

from ..ops.choice import PROVIDERS
from ..verbs import doctor, operators
from .arguments import Parser, finish, shared


def main(argv: Sequence[str] | None = None) -> int:
    """Print the report; exit code 1: a package is broken or outdated."""
    parser = Parser(
        'doctor', 'Print what decides about bits on this machine (hardware, versions, flags and '
        'environment variables), and which packages are broken, outdated or untried, with the '
        'commands that fix them. With --operators, list mmcv\'s compiled operators: the provider '
        'of each and why, whether it gives the same bits every time, and who uses it. Whether '
        'training repeats on this GPU is measured in a checkout of mmrepro, by '
        'tools/gpu_check.py.',
        'examples:\n  mmrepro doctor\n  mmrepro doctor --operators --device cuda --json\n\n'
        'exit code: 0 done, 1 a package is broken or outdated, 2 wrong usage', shared(json=None))
    parser.add_argument('--operators', nargs='?', const='auto', choices=PROVIDERS,
                        help='list the operators; with a value, the choices of this '
                        "randomness.operators, or mmcv's own (compiled) (default: auto, as in a "
                        'deterministic run)')
    parser.add_argument('--device', choices=('cpu', 'cuda'),
                        help='of --operators it need not be there (default: cuda if there is one)')
    args = parser.parse_args(argv)
    if args.operators is not None:
        return finish(operators(args.device, args.operators), args)
    return finish(doctor(args.device), args)
