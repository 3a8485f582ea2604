"""Draw the figure of README.md from the losses of four trainings.

    python dev/two_runs_figure.py --runs STOCK_0 STOCK_2 OURS_0 OURS_2
    python dev/two_runs_figure.py

The first command reads the work directories, the second docs/results/two_runs.json.
Two trainings of one config with 0 and with 2 data loading workers, by MMEngine's runner without
mmrepro (a compiled mmcv is needed for that) and with it, `seed=42` and `deterministic=True` in all.
"""
from __future__ import annotations

import argparse
import functools
import json
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from dev import figures  # noqa: E402

RESULTS = ROOT / 'docs' / 'results' / 'two_runs.json'
TITLES = {'stock': 'MMDetection', 'mmrepro': 'with mmrepro'}


def losses_of(folder: Path) -> list[float]:
    """Return the loss of each iteration in a work directory."""
    log = max(folder.glob('*/vis_data/scalars.json'))
    rows = map(json.loads, log.read_text().splitlines())
    return [row['loss'] for row in rows if 'loss' in row]


def first_difference(pair: list[list[float]]) -> int | None:
    """Return the first iteration, counted from 1, at which two runs differ."""
    return next((at for at, (a, b) in enumerate(zip(*pair), 1) if a != b), None)


def draw(runs: dict[str, list[list[float]]], figure: Any, axes: Any) -> None:
    for axis, (kind, pair) in zip(axes, runs.items()):
        for losses, color, width, workers in zip(pair, figures.COLORS, (4, 1.6), (0, 2)):
            axis.plot(range(1, len(losses) + 1), losses, color=color, linewidth=width,
                      label=f'{workers} workers')
        at = first_difference(pair)
        said = f'iteration {at}: the losses differ' if at else (
            f'{len(pair[0])} iterations: the same bits')
        axis.set_title(f'{TITLES[kind]}\n{said}')
        axis.set_xlabel('iteration')
    axes[0].set_ylabel('loss')
    axes[0].legend()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--runs', nargs=4, type=Path)
    args = parser.parse_args()
    if args.runs:
        losses = [losses_of(folder) for folder in args.runs]
        RESULTS.write_text(json.dumps(dict(stock=losses[:2], mmrepro=losses[2:])) + '\n')
    runs = json.loads(RESULTS.read_text())
    figures.save('two-runs', functools.partial(draw, runs), ncols=2, figsize=(9, 3), sharey=True)


if __name__ == '__main__':
    main()
