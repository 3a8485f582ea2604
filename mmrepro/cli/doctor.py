"""``mmrepro doctor``: the environment, its packages, mmcv's operators."""
from __future__ import annotations

from collections.abc import Sequence

from ..ops.provider import PROVIDERS
from ..verbs import doctor, operators, upgrade
from .arguments import Parser, finish, shared


def main(argv: Sequence[str] | None = None) -> int:
    """Print the report; exit code 1: a package is broken or outdated."""
    parser = Parser(
        'doctor', 'Print what decides about bits on this machine (hardware, versions, flags and '
        'environment variables), and which packages are broken, outdated or untried, with the '
        'commands that fix them. With --operators, list mmcv\'s compiled operators: the provider '
        'of each and why, whether it gives the same bits every time, and who uses it. With a run '
        'or a config, say what other versions of packages change in it: the installed ones beside '
        'those of the run, or those of --with, which need not be installed. Whether '
        'training repeats on this GPU is measured in a checkout of mmrepro, by '
        'tools/gpu_check.py.',
        'examples:\n  mmrepro doctor\n  mmrepro doctor work_dirs/monday\n'
        '  mmrepro doctor config.py --with opencv-python==4.11.0 numpy==1.26.4\n'
        '  mmrepro doctor --operators --device cuda --json\n\n'
        'exit code: 0 done, 1 a package is broken or outdated, or a version changes bits, 2 wrong '
        'usage', shared(json=None))
    parser.add_argument('path', nargs='?', metavar='RUN|CONFIG',
                        help='a work directory with fingerprints, or the config of a training')
    parser.add_argument('--with', nargs='+', dest='versions', metavar='PACKAGE==VERSION',
                        help='versions of RUN or CONFIG in place of the installed ones')
    parser.add_argument('--operators', nargs='?', const='auto', choices=PROVIDERS,
                        help='list the operators; with a value, the choices of this '
                        "randomness.operators, or mmcv's own (compiled) (default: auto, as in a "
                        'deterministic run)')
    parser.add_argument('--device', choices=('cpu', 'cuda'),
                        help='of --operators it need not be there (default: cuda if there is one)')
    args = parser.parse_args(argv)
    if args.path is None and args.versions:
        parser.error('--with needs a run or a config, whose parts it is about')
    if args.path is not None and args.operators is not None:
        parser.error(f'{args.path} has no meaning with --operators')
    if args.path is not None:
        return finish(upgrade(args.path, args.versions or ()), args)
    if args.operators is not None:
        return finish(operators(args.device, args.operators), args)
    return finish(doctor(args.device), args)
