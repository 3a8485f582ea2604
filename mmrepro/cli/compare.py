"""``mmrepro compare RUN_A RUN_B``."""
from __future__ import annotations

import json
import math
import sys
from collections.abc import Sequence
from typing import Any

from ..errors import MissingPackageError, RunError
from ..report import tolerance
from ..report.comparison import Comparison, compare_runs, manifest_differences
from ..report.comparison_plots import draw
from ..report.html import advice, report
from ..report.publish import publish, write_files
from ..report.run_view import load_run
from ..report.terminal import console, table
from ..report.weight_distances import checkpoint_distances
from ..runs.config_files import find_config, read_config
from ..text import shorten
from .arguments import Parser, quiet_when_reader_leaves

MAX_ROWS = 20  # of a table in the terminal


def compare(path_a: str, path_b: str, weights: bool = True) -> Comparison:
    """Read two runs, with their checkpoints if ``weights``, and compare all that both have.

    Raises:
        RunError: a path holds no run.
    """
    a, b = load_run(path_a), load_run(path_b)
    if a.name == b.name:
        a.name, b.name = a.path, b.path
    found = compare_runs(a, b)
    found.manifest = manifest_differences(a, b)
    if weights:
        found.weights = checkpoint_distances(a, b)
    return found


def write(found: Comparison, folder: str) -> dict[str, str]:
    """Write ``compare.html`` and the pictures; returns what was written, by name.

    Raises:
        MissingPackageError: matplotlib is not installed; nothing is written then.
    """
    pictures = draw(found)
    files = {f'{name}.png': data for name, data in pictures.items()}
    files['compare.html'] = report(found, pictures).encode()
    return dict(zip((*pictures, 'page'), write_files(folder, files)))


@quiet_when_reader_leaves
def main(argv: Sequence[str] | None = None) -> int:
    """Compare two runs; 0: nothing differs, 1: something does, 2: they cannot be compared."""
    parser = Parser(
        'compare', 'Where do two runs diverge, and how does the difference grow? With '
        'fingerprints (train --fingerprint) in both, bits are compared; without, what MMEngine '
        'logged.',
        'example:\n  %(prog)s work_dirs/monday work_dirs/tuesday --out comparison\n\n'
        'exit code: 0 nothing differs (with --tolerance: by more than it), 1 something does, '
        '2 nothing to compare or wrong usage')
    parser.add_argument('run_a', help='a work directory, a time-stamped folder of MMEngine, or a '
                        'scalars.json')
    parser.add_argument('run_b', help='the other one')
    parser.add_argument('--out', metavar='DIR', help='write plots (PNG) and compare.html here')
    parser.add_argument('--publish', metavar='CONFIG', help="also send the result to TensorBoard, "
                        "Weights & Biases and so on: the backends of this config's visualizer")
    parser.add_argument('--all', action='store_true',
                        help='list every difference in what the runs were made of, harmless or not')
    parser.add_argument('--json', action='store_true', help='write JSON to the standard output')
    parser.add_argument('--no-weights', action='store_true',
                        help='leave checkpoints unread (they are large)')
    parser.add_argument('--tolerance', type=float, metavar='REL',
                        help='for runs on other machines: how far losses, norms and metrics are '
                        'apart, and whether by more than this relative difference')
    args = parser.parse_args(argv)
    if args.out:
        parser.make_folder(args.out, '--out')
    try:
        found = compare(args.run_a, args.run_b, weights=not args.no_weights)
        near = None if args.tolerance is None else tolerance.measure(found, args.tolerance)
        written = write(found, args.out) if args.out else {}
        if args.publish:
            cfg = read_config(find_config(args.publish), imports=False)
            folder = args.out or found.b.path
            names = publish(cfg, folder, 'mmrepro/compare', scalars(found), draw(found))
            if not names:
                raise RunError(
                    f'--publish {args.publish}: its visualizer has no backend beside the local '
                    "one; add for example dict(type='TensorboardVisBackend') to vis_backends")
            written.update({name: f'scalars and pictures to {name}, {folder}' for name in names})
    # AuditError, of a bad path of a config, and RunError are ValueErrors
    except (ValueError, MissingPackageError, OSError) as error:
        print(f'{parser.prog}: {error}', file=sys.stderr)
        return 2
    code = 2 if not found.common else int(not (found.equal if near is None else near.within))
    if args.json:
        more = {} if near is None else dict(tolerance=near.as_dict())
        print(json.dumps({**as_dict(found, code, written), **more}, indent=2))
        return code
    show(found, console(), args.all)
    if near is not None:
        print()
        tolerance.show(near, console())
    for path in written.values():
        print(f'wrote {path}')
    if not written:
        print('--out DIR writes plots and an HTML report')
    return code


def scalars(found: Comparison) -> list[tuple[str, float, int]]:
    """``(tag, value, step)``: the verdict, and the difference of every loss at every iteration."""
    rows = [('mmrepro/compare/equal', float(found.equal), 0)]
    if found.first is not None:
        rows.append(('mmrepro/compare/first_difference', float(found.first.iteration), 0))
    for name, (steps, one, other) in found.losses.items():
        rows += [(f'mmrepro/compare/{name}_difference', b - a, i)
                 for i, a, b in zip(steps, one, other) if math.isfinite(b - a)]
    return rows


def as_dict(found: Comparison, code: int, written: dict[str, str]) -> dict[str, Any]:
    """Plain data for ``--json``; numbers that JSON lacks are null."""
    first = found.first
    return dict(
        exit_code=code, equal=found.equal, exact=found.exact, verdict=found.verdict(),
        runs=[dict(path=run.path, kind=run.kind, iterations=len(run.iterations),
                   starts=run.starts) for run in (found.a, found.b)],
        common=len(found.common), differing=found.differing,
        only=[len(extra) for extra in found.only],
        first=None if first is None else dict(
            iteration=first.iteration, epoch=first.epoch, rank=first.rank,
            field=first.field.field, names=list(first.field.names), module=first.module,
            fields=[field._asdict() for field in first.fields]),
        manifest=[row._asdict() for row in found.manifest],
        parted=found.diverged,
        weights=[row._asdict() for row in found.weights],
        losses={name: dict(
            iteration=steps[-1], a=_finite(one[-1]), b=_finite(other[-1]),
            largest_difference=_finite(max((abs(b - a) for a, b in zip(one, other)
                                            if math.isfinite(b - a)), default=math.nan)))
                for name, (steps, one, other) in found.losses.items()},
        notes=found.notes, written=written)


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def show(found: Comparison, console: Any, everything: bool = False) -> None:
    """Print the comparison; ``everything``: also what is harmless, and rows of any number."""
    from rich.text import Text

    def rows(header: Sequence[str], cells: Sequence[Sequence[str]], marked: str = '') -> None:
        """Print a table; rows whose last cell is ``marked`` stand out."""
        shown = table(*header)
        for row in cells:
            shown.add_row(*row, style='bold red' if marked and row[-1] == marked else '')
        console.print(shown)

    rows(('', 'directory', 'read from', 'iterations', 'starts'),
         [(letter, run.path, run.kind, str(len(run.iterations)), str(run.starts))
          for letter, run in (('A', found.a), ('B', found.b))])
    for note in found.notes:
        console.print(Text(f'note: {note}', 'yellow'))
    if found.manifest:
        serious = [row for row in found.manifest if row.severity != 'harmless']
        shown = found.manifest if everything else serious[:MAX_ROWS]
        console.print()
        if shown:
            rows(('made of', 'A', 'B', 'severity', 'consequence'),
                 [(row.name, shorten(row.then, 40), shorten(row.now, 40), row.severity,
                   row.consequence) for row in shown])
        more = len(found.manifest) - len(shown)
        if more:
            harmless = len(found.manifest) - len(serious)
            console.print(Text(f'{more} more difference{"" if more == 1 else "s"} in what they '
                               f'were made of, {"all" if harmless == more else harmless} '
                               'harmless; --all lists them', 'dim'))
    if found.first is not None:
        console.print()
        rows((f'iteration {found.first.iteration}', 'A', 'B', ''),
             [(field.field, field.a, field.b, 'same' if field.same else 'differs')
              for field in found.first.fields], marked='differs')
        if found.first.module:
            console.print(Text(found.first.module))
        if found.losses:
            console.print()
            rows(('loss', 'last common', 'A', 'B', 'largest difference'),
                 [(name, str(steps[-1]), f'{one[-1]:.9g}', f'{other[-1]:.9g}',
                   f'{max(abs(b - a) for a, b in zip(one, other)):.3g}')
                  for name, (steps, one, other) in list(found.losses.items())[:MAX_ROWS]])
    weights = [(row.name, *row.shown(), row.note) for row in found.weights
               if row.distance or row.note]
    if weights:
        console.print()
        rows(('checkpoint', 'distance', 'relative', 'note'), weights)
    console.print(Text(f'\n{found.verdict()}', 'bold green' if found.equal else 'bold red'))
    for item in advice(found):
        console.print(Text(f'  {item}'))
