"""One look for all plots: colors that color-blind readers tell apart, plain axes, PNG bytes."""
from __future__ import annotations

import contextlib
import io
from collections.abc import Iterator
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


def png(fig: Any) -> bytes:
    """Return the figure as the bytes of a PNG file, the same for the same figure."""
    buffer = io.BytesIO()
    fig.savefig(buffer, format='png', dpi=110, metadata={'Software': None})
    return buffer.getvalue()
