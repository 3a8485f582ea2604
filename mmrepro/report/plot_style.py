"""One look for all plots: colors that color-blind readers tell apart, plain axes, PNG bytes."""
from __future__ import annotations

import contextlib
import io
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from ..errors import MissingPackageError

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
    """Return what a figure looks like."""
    files = {}
    for kind, metadata in (('png', 'Software'), ('svg', 'Date')):
        buffer = io.BytesIO()
        fig.savefig(buffer, format=kind, dpi=110, metadata={metadata: None})
        files[kind] = buffer.getvalue()
    drawing = Drawing(files['png'])
    drawing.svg = files['svg']
    return drawing
