"""Measure the time of COCO's figures for 1,000 resamples of 5,000 images on one core.

    python benchmarks/coco_bootstrap.py [--images N] [--resamples N] [--out FILE]

Draws annotations and results of the size of COCO's val2017 at random: 80 categories, about 36,000
objects, about 100 detections an image. Prints the CPU time of each part and of a whole evaluation
by pycocotools, and checks that the figures without weights are those of pycocotools. Nothing else
should run on the machine.
"""
from __future__ import annotations

import argparse
import contextlib
import io
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / 'tests'))

from support.coco_results import draw_dataset, draw_results  # noqa: E402

from mmrepro.report.coco.bootstrap import resampled_figures  # noqa: E402
from mmrepro.report.coco.matches import Matches  # noqa: E402
from mmrepro.report.coco.predictions import load_annotations, load_predictions  # noqa: E402


def measure(images: int, resamples: int) -> dict[str, Any]:
    from pycocotools.cocoeval import COCOeval
    seconds: dict[str, float] = {}

    @contextlib.contextmanager
    def timed(name: str) -> Any:
        start = time.process_time()
        with contextlib.redirect_stdout(io.StringIO()):
            yield
        seconds[name] = round(time.process_time() - start, 2)

    dataset = draw_dataset(images, 80)
    results = draw_results(dataset, extra=90)
    with tempfile.TemporaryDirectory() as folder:
        paths = [Path(folder) / name for name in ('annotations.json', 'results.json')]
        for path, content in zip(paths, (dataset, results)):
            path.write_text(json.dumps(content))
        with timed('read the files'):
            annotations = load_annotations(str(paths[0]))
            predictions = load_predictions(str(paths[1]), annotations)
    evaluation = COCOeval(annotations, predictions, 'bbox')
    with timed('match, once (pycocotools)'):
        evaluation.evaluate()
    with timed('arrange the matches, once'):
        matches = Matches(evaluation)
    with timed(f'{resamples} resamples'):
        resampled_figures([[matches]], resamples)
    with timed('accumulate, once (pycocotools)'):
        evaluation.accumulate()
        evaluation.summarize()
    difference = float(np.abs(matches.figures() - evaluation.stats).max())
    return dict(images=images, objects=len(dataset['annotations']), detections=len(results),
                resamples=resamples, seconds=seconds, largest_difference=difference)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('--images', type=int, default=5000)
    parser.add_argument('--resamples', type=int, default=1000)
    parser.add_argument('--out', help='write the result as JSON')
    args = parser.parse_args()
    found = measure(args.images, args.resamples)
    print(f'{found["images"]} images, {found["objects"]} objects, {found["detections"]} detections')
    for name, value in found['seconds'].items():
        print(f'{value:8.2f} s  {name}')
    print(f'largest difference to pycocotools: {found["largest_difference"]:.1e}')
    if args.out:
        Path(args.out).write_text(json.dumps(found, indent=1) + '\n')
    return 0 if found['largest_difference'] < 1e-12 else 1


if __name__ == '__main__':
    sys.exit(main())
