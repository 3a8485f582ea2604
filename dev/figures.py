"""Figures of the docs, as an SVG for light pages and one for dark pages."""
from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

IMAGES = Path(__file__).resolve().parents[1] / 'docs' / 'images'
COLORS = ('#e4572e', '#2e86e4')
INKS = {'': '#24292f', '-dark': '#e6edf3'}  # of text and axes


def save(name: str, draw: Callable[[Any, Any], None], **subplots: Any) -> None:
    """Write ``docs/images/{name}.svg`` and ``{name}-dark.svg``; ``draw`` gets figure and axes."""
    import matplotlib
    matplotlib.use('svg')
    import matplotlib.pyplot as plt
    for suffix, ink in INKS.items():
        matplotlib.rcParams.update({
            'svg.hashsalt': 'mmrepro', 'text.color': ink, 'font.size': 11, 'axes.labelcolor': ink,
            'xtick.color': ink, 'ytick.color': ink, 'axes.edgecolor': ink,
            'axes.titlecolor': ink, 'legend.frameon': False})
        figure, axes = plt.subplots(layout='constrained', **subplots)
        draw(figure, axes)
        for axis in figure.axes:
            axis.spines[['top', 'right']].set_visible(False)
        figure.savefig(IMAGES / f'{name}{suffix}.svg', transparent=True, metadata=dict(Date=None))
        plt.close(figure)
