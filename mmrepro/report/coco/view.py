"""The report of COCO's figures with their intervals."""
from __future__ import annotations

import math
from typing import Any

from ...exit_codes import DIFFERENT, DONE
from ..model import Figure, Table
from ..plot_style import INK, figure, palette, png
from ..report import Report
from .bootstrap import NAMES, ImageStudy, Interval

FEW_SEEDS = 5


def caution(found: ImageStudy) -> list[str]:
    """What a careful reader would ask for."""
    said = []
    if found.seeds == 1:
        said.append('one training each: the intervals are about which images were tested, not '
                    'about the seed; give the predictions of several seeds, separated by commas')
    elif found.seeds < FEW_SEEDS:
        said.append(f'{found.seeds} seeds: the part of the intervals that is due to the seed is '
                    f'too small, by about 1 / {found.seeds}')
    if found.versus:
        said.append(f'the answer is about {found.metric}, which was chosen beforehand; of '
                    f'{len(NAMES)} figures, one is often different by chance')
    return said


def verdicts(found: ImageStudy) -> list[str]:
    """What the tests say about the figure that was asked about, in words."""
    first = next(iter(found.figures))
    what = 'the images' if found.seeds == 1 else 'images and seeds'
    several = ' after Holm\'s correction' if len(found.versus) > 1 else ''
    said = []
    for label, figures in found.versus.items():
        one = figures[found.metric]
        gap = one.difference
        words = (f'{"larger" if gap.value > 0 else "smaller"} than that of {first} by more than '
                 f'the noise of {what}' if one.larger else
                 f'not different from that of {first} by more than the noise of {what}')
        said.append(f'{found.metric} of {label} is {words}: {gap.value:+.4f} '
                    f'({_range(gap)}), p = {one.corrected:.2g}{several}')
        if found.margin is not None:
            said.append(f'{"the same" if one.same else "not shown to be the same"} within '
                        f'{found.margin:g} (90 % interval {one.low_90:+.4f} to {one.high_90:+.4f}, '
                        f'p = {one.same_p:.2g})')
    return said


def _range(one: Interval) -> str:
    return '-' if math.isnan(one.low) else f'{one.low:.4f} to {one.high:.4f}'


def _number(value: float | None, sign: str = '') -> str:
    return '-' if value is None or math.isnan(value) else f'{value:{sign}.4f}'


def _head(found: ImageStudy) -> list[str]:
    head = ['figure']
    for label in found.figures:
        head += [label, '95 % interval']
    return head + ([] if found.seeds == 1 else ['std images', 'std seeds'])


def _rows(found: ImageStudy) -> list[list[str]]:
    rows = []
    for name in NAMES:
        row = [name]
        for figures in found.figures.values():
            row += [_number(figures[name].value), _range(figures[name])]
        if found.seeds > 1:
            one = next(iter(found.figures.values()))[name]
            row += [_number(one.std_images), _number(one.std_seeds)]
        rows.append(row)
    return rows


VERSUS = ('difference', '', '95 % interval', 'p')


def _gaps(found: ImageStudy, label: str) -> list[list[str]]:
    return [[name, _number(one.difference.value, '+'), _range(one.difference),
             '-' if math.isnan(one.difference.value) else f'{one.p:.3g}']
            for name, one in found.versus[label].items()]


def _title(found: ImageStudy) -> str:
    seeds = '' if found.seeds == 1 else f', {found.seeds} seeds'
    return f'{found.images} images{seeds}, {found.resamples} resamples'


def plot(found: ImageStudy) -> bytes:
    """All figures with their intervals; of several detectors, the differences to the first too."""
    labels, others = list(found.figures), list(found.versus)
    rows = range(len(NAMES))
    with figure(1, 2 if others else 1, figsize=(11 if others else 6.5, 4.6), squeeze=False,
                sharey=True) as (fig, grid):
        axes, colors = grid[0][0], palette(len(labels))
        for place, (label, color) in enumerate(zip(labels, colors)):
            shift = .16 * (place - (len(labels) - 1) / 2)
            _errors(axes, [found.figures[label][name] for name in NAMES], shift, color, label)
        axes.set_yticks(list(rows), NAMES)
        axes.set_ylim(len(NAMES) - .5, -.5)
        axes.set_xlabel('value, 95 % interval')
        axes.set_title(_title(found))
        if others:
            axes.legend(loc='best')
            axes = grid[0][1]
            axes.axvline(0, color=INK, linewidth=1)
            if found.margin is not None:
                axes.axvspan(-found.margin, found.margin, color=INK, alpha=.08, linewidth=0)
            for place, (label, color) in enumerate(zip(others, colors[1:])):
                shift = .16 * (place - (len(others) - 1) / 2)
                _errors(axes, [found.versus[label][name].difference for name in NAMES], shift,
                        color, label)
            axes.set_xlabel('difference, 95 % interval')
            axes.set_title(f'against {labels[0]}')
        return png(fig)


def _errors(axes: Any, intervals: list[Interval], shift: float, color: str, label: str) -> None:
    for row, one in enumerate(intervals):
        axes.plot([one.low, one.high], [row + shift] * 2, color=color, linewidth=1.6)
    axes.scatter([one.value for one in intervals],
                 [row + shift for row in range(len(intervals))], color=color, s=26, zorder=3,
                 edgecolor='white', linewidth=.5, label=label)


def report_of(found: ImageStudy) -> Report:
    """The report of a study; 1 is its exit code if what was asked for was not found."""
    first = next(iter(found.figures))
    return Report(
        f'{" and ".join(found.figures)}: {_title(found)}', '\n'.join(verdicts(found)),
        DIFFERENT if found.answer is False else DONE,
        [Table(_head(found), _rows(found), _title(found)),
         *(Table(VERSUS, _gaps(found, label), f'{label} - {first}') for label in found.versus)],
        caution(found), figures={'seeds': Figure('Figures of COCO', lambda: plot(found))},
        data=found._asdict())
