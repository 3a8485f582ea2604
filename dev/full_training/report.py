"""Tables and figure of the trainings to their end: ``python -m dev.full_training.report``."""
from __future__ import annotations

import functools
import json
import math
import statistics
from collections.abc import Callable, Mapping
from typing import Any

from dev import figures
from dev.full_training.__main__ import RESULTS, STREAMS

Rows = Mapping[str, Mapping[str, Any]]
BASE = 'mmrepro'
SAME = ('mmrepro, 2 workers', 'mmrepro, resumed')
INTEL = 'Intel Xeon'  # the CPU of the runs that vary one stream
ENVIRONMENTS = ('two threads', 'AVX2', 'OpenCV 4.11', INTEL)


def _is_of(stream: str, name: str) -> bool:
    return name == INTEL or name.startswith(stream)


GROUPS: dict[str, Callable[[str], bool]] = {
    'stock, one seed': lambda name: name.startswith('stock'),
    'mmrepro, the same seed': lambda name: name in (BASE, *SAME),
    'mmrepro, another environment': lambda name: name in (BASE, *ENVIRONMENTS),
    'mmrepro, other seeds': lambda name: name == BASE or name.startswith('seed'),
    **{f'mmrepro, {stream} only': functools.partial(_is_of, stream)
       for stream in STREAMS},
}


def groups(rows: Rows) -> dict[str, list[Mapping[str, Any]]]:
    """Return the runs of each group of two or more; the first run of mmrepro is in most of them."""
    found = {title: [row for name, row in rows.items() if belongs(name)]
             for title, belongs in GROUPS.items()}
    return {title: members for title, members in found.items() if len(members) > 1}


def best(row: Mapping[str, Any]) -> int:
    """Return the epoch with the largest mAP, the first of equal ones, as ``save_best`` does."""
    return int(row['epochs'][row['mAP'].index(max(row['mAP']))])


def table(results: Mapping[str, Rows]) -> str:
    """Return two Markdown tables for each detector: groups of runs, and all runs. mAP of 100."""
    lines: list[str] = []
    for detector, rows in results.items():
        lines += [f'**{detector}**', '',
                  '| | runs | different weights | mAP | standard deviation (95 %) | best epoch |',
                  '|---|---|---|---|---|---|']
        for title, members in groups(rows).items():
            last = [100 * row['mAP'][-1] for row in members]
            epochs = sorted({best(row) for row in members})
            lines.append(
                f'| {title} | {len(members)} | {len({row["weights"] for row in members})} | '
                f'{_span(last)} | {_deviation(last)} | {", ".join(map(str, epochs))} |')
        lines += ['', '| run | mAP | best epoch | weights |', '|---|---|---|---|']
        lines += [f'| {name} | {100 * row["mAP"][-1]:.1f} | {best(row)} | `{row["weights"][:8]}` |'
                  for name, row in rows.items()]
        lines.append('')
    return '\n'.join(lines[:-1])


def _deviation(values: list[float]) -> str:
    """Return the standard deviation, with the 95 % interval of normally distributed values."""
    from scipy.stats import chi2
    found, free = statistics.stdev(values), len(values) - 1
    if not found:
        return '0'
    low, high = (found * math.sqrt(free / chi2.ppf(part, free)) for part in (.975, .025))
    return f'{found:.1f} ({low:.1f} to {high:.1f})'


def _span(values: list[float]) -> str:
    low, high = f'{min(values):.1f}', f'{max(values):.1f}'
    return low if low == high else f'{low} to {high}'


def draw(rows: Rows, figure: Any, axes: Any) -> None:
    """Draw the mAP of each epoch, and that of the last by group."""
    stock, ours = figures.COLORS
    curves, dots = axes
    for color, title, width in ((stock, 'stock, one seed', 1.2),
                                (ours, 'mmrepro, the same seed', 1.6)):
        members = groups(rows)[title]
        for number, row in enumerate(members):
            curves.plot(row['epochs'], [100 * value for value in row['mAP']], color=color,
                        linewidth=width, label='' if number else f'{title}: {len(members)} runs')
    curves.set_xlabel('epoch')
    curves.set_ylabel('mAP')
    curves.legend(loc='lower right')
    names = list(groups(rows))
    for at, title in enumerate(reversed(names)):
        values = [100 * row['mAP'][-1] for row in groups(rows)[title]]
        dots.plot(values, [at] * len(values), 'o', markersize=7, alpha=0.6,
                  color=stock if title.startswith('stock') else ours)
    dots.set_yticks(range(len(names)), list(reversed(names)))
    dots.set_ylim(-0.6, len(names) - 0.4)
    dots.set_xlabel('mAP after the last epoch')
    dots.grid(axis='x', alpha=0.25)


def main() -> None:
    for detector, rows in json.loads(RESULTS.read_text()).items():
        figures.save(f'full-training-{detector.replace("_", "-")}',
                     functools.partial(draw, rows), ncols=2, figsize=(11, 3.6),
                     width_ratios=(1.2, 1))


if __name__ == '__main__':
    main()
