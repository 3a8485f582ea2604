"""The plots of a comparison, and one look for all plots.

A function of :data:`PLOTS` returns a PNG, or None where there is nothing to show. Iterations are
counted from 0. A is drawn solid and wide, B dashed and narrow on top, so that two equal lines are
both seen. Colors are those that color-blind readers tell apart.
"""
from __future__ import annotations

import contextlib
import io
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import accumulate, groupby
from typing import Any

from ..errors import MissingPackageError
from .comparison import NOT_COUNTED, Column, Comparison, has_objects

# Okabe and Ito's colors (jfly.uni-koeln.de/color), told apart with any color vision
A, B, DIFFERENCE, INK, SOFT = '#0072B2', '#D55E00', '#009E73', '#22272e', '#8b949e'
_MORE = (A, B, DIFFERENCE, '#CC79A7', '#E69F00', '#56B4E9', '#7a5195', '#000000')

_STYLE: dict[str, Any] = {
    'figure.facecolor': 'white', 'axes.facecolor': 'white', 'savefig.facecolor': 'white',
    'font.family': 'sans-serif', 'font.size': 10, 'axes.titlesize': 11, 'axes.titleweight': 'bold',
    'axes.titlelocation': 'left', 'axes.labelcolor': INK, 'text.color': INK,
    'xtick.color': INK, 'ytick.color': INK, 'axes.edgecolor': SOFT, 'axes.grid': True,
    'grid.color': '#e4e7eb', 'grid.linewidth': 0.8, 'axes.axisbelow': True,
    'axes.spines.top': False, 'axes.spines.right': False, 'legend.frameon': False,
    'legend.fontsize': 9, 'lines.linewidth': 1.6, 'axes.formatter.useoffset': False,
    'svg.hashsalt': 'mmrepro',  # names of parts of an SVG file are random otherwise
}


@contextlib.contextmanager
def figure(*args: Any, figsize: tuple[float, float] = (8, 3.4),
           **kwargs: Any) -> Iterator[Any]:
    """Yield figure and axes of ``matplotlib.pyplot.subplots``, without a display."""
    try:
        import matplotlib
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
        from matplotlib.ticker import MaxNLocator
    except ModuleNotFoundError as error:
        raise MissingPackageError('plots need matplotlib: pip install matplotlib (or '
                                  'mmrepro[plots]); tables and --json work without') from error
    style: dict[Any, Any] = {**matplotlib.rcParamsDefault, **_STYLE, 'backend': 'agg'}
    with matplotlib.rc_context(style):
        # pyplot keeps global state of the process, which may be somebody's notebook
        fig = Figure(figsize=figsize, layout='constrained')
        FigureCanvasAgg(fig)
        axes = fig.subplots(*args, **kwargs)
        for plot in fig.axes:  # iterations and seeds are whole numbers
            plot.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=7))
        yield fig, axes


def palette(count: int) -> list[str]:
    """Return colors for ``count`` lines."""
    return [_MORE[index % len(_MORE)] for index in range(count)]


def plain_log(axis: Any) -> None:
    """Label a logarithmic axis in plain numbers: 28.15 where matplotlib writes 2.815x10^1."""
    from matplotlib.ticker import LogFormatter

    class Plain(LogFormatter):
        def __call__(self, value: float, position: int | None = None) -> str:
            return f'{value:.6g}' if super().__call__(value, position) else ''

    axis.set_major_formatter(Plain())
    axis.set_minor_formatter(Plain(minor_thresholds=(1, .4)))


def apart(values: Sequence[float], distance: float, widest: float) -> list[float]:
    """Return offsets that place equal values side by side, over a width of at most ``widest``.

    >>> apart([.3, .5, .3], .1, .2)
    [-0.05, 0.0, 0.05]
    """
    counts, seen = Counter(values), Counter[float]()
    offsets = []
    for value in values:
        gaps = counts[value] - 1
        offsets.append((seen[value] - gaps / 2) * min(distance, widest / max(gaps, 1)))
        seen[value] += 1
    return offsets


class Drawing(bytes):
    """A figure as the bytes of a PNG file, and as ``svg``; the same for the same figure."""
    svg: bytes


def png(fig: Any) -> Drawing:
    """Return the figure as the bytes of a PNG file."""
    files = {}
    for kind, metadata in (('png', 'Software'), ('svg', 'Date')):
        buffer = io.BytesIO()
        fig.savefig(buffer, format=kind, dpi=110, metadata={metadata: None})
        files[kind] = buffer.getvalue()
    drawing = Drawing(files['png'])
    drawing.svg = files['svg']
    return drawing


MAX_LOSSES, MAX_BLOCKS = 6, 26
_TOTAL = 'loss'


def _mark_first(axes: Any, comparison: Comparison) -> None:
    if comparison.first is not None:
        axes.axvline(comparison.first.iteration, color=INK, linewidth=1, linestyle=':',
                     label=f'first difference, iteration {comparison.first.iteration}')


def _shown(losses: dict[str, Column]) -> list[str]:
    """Return the names of the total and of the largest parts."""
    return sorted(losses, key=lambda name: (name != _TOTAL, -max(
        (abs(v) for v in losses[name].a if math.isfinite(v)), default=0.)))[:MAX_LOSSES]


def loss_curves(comparison: Comparison) -> bytes | None:
    """Draw every loss of both runs over the iterations."""
    names = _shown(comparison.losses)
    if not names:
        return None
    columns = min(len(names), 3)
    rows = -(-len(names) // columns)
    with figure(rows, columns, figsize=(3.6 * columns + .6, 2.5 * rows + .5), squeeze=False,
                sharex=True) as (fig, grid):
        for axes in grid.flat[len(names):]:
            axes.set_visible(False)
        for axes, name in zip(grid.flat, names):
            steps, values_a, values_b = comparison.losses[name]
            axes.plot(steps, values_a, color=A, linewidth=3.2, label=f'A  {comparison.a.name}')
            axes.plot(steps, values_b, color=B, linewidth=1.4, linestyle=(0, (4, 2)),
                      label=f'B  {comparison.b.name}')
            _mark_first(axes, comparison)
            axes.set_title(name)
        fig.supxlabel('iteration', fontsize=10)
        fig.supylabel('loss', fontsize=10)
        fig.legend(*grid[0][0].get_legend_handles_labels(), loc='outside upper left', ncols=3)
        return png(fig)


def loss_differences(comparison: Comparison) -> bytes | None:
    """Draw B - A of every loss: linear on the left, absolute on a log scale on the right."""
    names = _shown(comparison.losses)
    if not names:
        return None
    with figure(1, 2, figsize=(10, 3.8), sharex=True) as (fig, (linear, log)):
        linear.set_xmargin(.03)
        positive = False
        for name, color in zip(names, palette(len(names))):
            steps, values_a, values_b = comparison.losses[name]
            gaps = [b - a for a, b in zip(values_a, values_b)]
            wide = 2.2 if name == _TOTAL else 1.2
            linear.plot(steps, gaps, color=color, linewidth=wide, label=name)
            seen = [(i, abs(gap)) for i, gap in zip(steps, gaps) if gap and math.isfinite(gap)]
            if seen:
                positive = True
                log.plot(*zip(*seen), color=color, linewidth=wide, label=name,
                         marker='o' if len(seen) < 60 else None, markersize=3)
        for axes in (linear, log):
            _mark_first(axes, comparison)
            axes.set_xlabel('iteration')
        linear.set_title('difference, linear', pad=14)
        linear.set_ylabel('loss of B − loss of A')
        log.set_title('size of the difference, log scale', pad=14)
        log.set_ylabel('|loss of B − loss of A|')
        if positive:
            log.set_yscale('log')
            plain_log(log.yaxis)
        else:
            log.text(.5, .5, 'no difference', transform=log.transAxes, ha='center', va='center',
                     color=SOFT)
        fig.legend(*linear.get_legend_handles_labels(), loc='outside lower center', ncols=4)
        return png(fig)


def metrics(comparison: Comparison) -> bytes | None:
    """Draw the metrics of the validations."""
    names = [name for name, column in comparison.vals.items() if has_objects(column)][:6]
    if not names:
        return None
    with figure(figsize=(8, 3.4)) as (fig, axes):
        for name, color in zip(names, palette(len(names))):
            steps, *values = comparison.vals[name]
            values_a, values_b = ([math.nan if value == NOT_COUNTED else value for value in part]
                                  for part in values)
            axes.plot(steps, values_a, color=color, linewidth=2.6, alpha=.6, marker='o',
                      label=f'{name}  A')
            axes.plot(steps, values_b, color=color, linewidth=1.2, linestyle=(0, (4, 2)),
                      marker='x', label=f'{name}  B')
        axes.set_xlabel('iterations trained' if comparison.exact else
                        'epoch or iteration, as logged')
        axes.set_ylabel('metric')
        fig.legend(loc='outside right upper')
        return png(fig)


def parameter_divergence(comparison: Comparison) -> bytes | None:
    """Draw a row for each parameter, in the color of the relative difference of its norms."""
    steps, names, rows = comparison.norms
    seen = [value for row in rows for value in row if value and math.isfinite(value)]
    if not seen:
        return None
    import numpy as np
    from matplotlib.colors import LogNorm
    values = np.array(rows).T
    values = np.ma.masked_where(values == 0, values)
    low, high = min(seen), max(seen)
    height = min(9., max(3., .07 * len(names) + 1))
    with figure(figsize=(9, height)) as (fig, axes):
        mesh = axes.pcolormesh(
            _edges(steps), np.arange(len(names) + 1), values, cmap='viridis',
            norm=LogNorm(min(low, high / 10), high), rasterized=True)
        axes.invert_yaxis()
        axes.grid(False)
        axes.set_facecolor('#eef1f4')
        ticks, labels = _blocks(names)
        axes.set_yticks(ticks, labels, fontsize=8)
        axes.set_xlabel('iteration')
        axes.set_ylabel('parameter')
        axes.set_title('relative difference of norms; pale: same bits')
        bar = fig.colorbar(mesh, ax=axes, label='| ‖A‖ − ‖B‖ | / ‖A‖', pad=.01)
        plain_log(bar.ax.yaxis)
        return png(fig)


def weight_distance(comparison: Comparison) -> bytes | None:
    """Draw the L2 distance of the weights: from checkpoints, and a lower bound from norms."""
    points = [(row.iteration, row.distance) for row in comparison.weights
              if row.distance is not None and row.iteration is not None]
    steps, names, _ = comparison.norms
    norms_a, norms_b = comparison.a.norms, comparison.b.norms
    # by the triangle inequality |‖a‖ - ‖b‖| <= ‖a - b‖, summed over parameters
    bound = [(i + 1, math.sqrt(sum((norms_a[i][name] - norms_b[i][name])**2 for name in names
                                   if name in norms_a[i] and name in norms_b[i]))) for i in steps]
    if not any(value for _, value in (*points, *bound)):
        return None
    with figure(figsize=(8, 3.4)) as (fig, axes):
        for pairs, style in (
                (bound, dict(color=A, label='at least this (from norms of parameters)')),
                (points, dict(color=DIFFERENCE, marker='D', linestyle='--',
                              label='exact (from checkpoints)'))):
            seen = [(i, value) for i, value in pairs if value]
            if seen:
                axes.plot(*zip(*seen), **style)
        _mark_first(axes, comparison)
        axes.set_yscale('log')
        plain_log(axes.yaxis)
        axes.set_xlabel('iterations trained')
        axes.set_ylabel('‖weights of A − weights of B‖₂')
        axes.legend()
        return png(fig)


# file name -> (title, function)
PLOTS = {
    'losses': ('Loss curves', loss_curves),
    'loss_differences': ('How the losses diverge', loss_differences),
    'parameters': ('Where it spreads: parameters', parameter_divergence),
    'weights': ('Distance of the weights', weight_distance),
    'metrics': ('Validation', metrics),
}


def _edges(steps: list[int]) -> list[float]:
    """Return the borders of the cells: half way between neighboring iterations."""
    middles = [(a + b) / 2 for a, b in zip(steps, steps[1:])]
    first = steps[0] - (middles[0] - steps[0] if middles else .5)
    last = steps[-1] + (steps[-1] - middles[-1] if middles else .5)
    return [first, *middles, last]


def _blocks(names: list[str]) -> tuple[list[float], list[str]]:
    """Return rows and labels for up to MAX_BLOCKS stretches of parameters with a common prefix."""
    for depth in range(8, 0, -1):
        prefixes = ['.'.join(name.split('.')[:depth]) for name in names]
        sizes = [(label, len(list(stretch))) for label, stretch in groupby(prefixes)]
        if len(sizes) <= MAX_BLOCKS:
            break
    ends = accumulate(size for _, size in sizes)
    # labels of short stretches would overlap
    blocks = [(end - size / 2, label) for end, (label, size) in zip(ends, sizes)
              if size > len(names) / MAX_BLOCKS / 2]
    return [row for row, _ in blocks], [label for _, label in blocks]
