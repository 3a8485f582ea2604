#!/usr/bin/env bash
# pycocotools: the mask of a polygon that is flipped upside down is not the flipped mask of the polygon.
# For circles with a radius of 60 pixels it never is, while a flip from left to right gives the same
# mask for a third of them, and nearly so for the others. Masks are filled column by column, from points
# that are rounded to a fifth of a pixel and then up in each column, at the upper border as at the lower
# one. With a radius of 5 pixels the IoU of the two is 0.977, and below 0.95, the last threshold of
# COCO's AP, for one in 25. So a dataset that was flipped as polygons has other objects than one that is
# flipped as masks, as RandomFlip(direction='vertical') of MMDetection has with poly2mask=False and
# True. faster-coco-eval makes the same masks.
#
# Behaviour seen with pycocotools 2.0.11, faster-coco-eval 1.8.0, numpy 2.4.6: 500 circles of each radius
# (polygons of 32 points with two decimals, as in COCO's files)
# Exits with an error if that changes.
set -euo pipefail
folder="$(mktemp -d)"
trap 'rm -rf "$folder"' EXIT
cd "$folder"
"${PYTHON:-python3}" -m venv venv
venv/bin/pip install --quiet --no-compile numpy==2.4.6 pycocotools==2.0.11 faster-coco-eval==1.8.0
cat > look.py <<'END'
import faster_coco_eval
import numpy as np
import pycocotools.mask

SIZE = 160
angles = np.arange(32) * np.pi / 16


def filled(library, x, y):
    polygon = np.stack([x, y], axis=1).round(2).ravel().tolist()
    return library.decode(library.frPyObjects([polygon], SIZE, SIZE))[..., 0]


for library in (pycocotools.mask, faster_coco_eval.mask):
    for radius in (5, 16, 60):
        random = np.random.RandomState(0)
        overlaps = {'left to right': [], 'upside down': []}
        for _ in range(500):
            center = random.uniform(70, 90, 2)
            x = (center[0] + radius * np.cos(angles)).round(2)
            y = (center[1] + radius * np.sin(angles)).round(2)
            mask = filled(library, x, y)
            for name, flipped in (('left to right', filled(library, SIZE - x, y)[:, ::-1]),
                                  ('upside down', filled(library, x, SIZE - y)[::-1])):
                overlaps[name].append((mask & flipped).sum() / (mask | flipped).sum())
        for name, found in overlaps.items():
            found = np.array(found)
            print(f'{library.__name__.split(".")[0]}, radius {radius}, {name}: {(found == 1).sum()} equal, '
                  f'IoU {found.mean():.3f}, below 0.95: {(found < .95).sum()}')
END
venv/bin/python -W ignore look.py | tee seen
diff seen - <<'END'
pycocotools, radius 5, left to right: 317 equal, IoU 0.994, below 0.95: 0
pycocotools, radius 5, upside down: 115 equal, IoU 0.977, below 0.95: 20
pycocotools, radius 16, left to right: 141 equal, IoU 0.998, below 0.95: 0
pycocotools, radius 16, upside down: 9 equal, IoU 0.992, below 0.95: 0
pycocotools, radius 60, left to right: 151 equal, IoU 1.000, below 0.95: 0
pycocotools, radius 60, upside down: 0 equal, IoU 0.998, below 0.95: 0
faster_coco_eval, radius 5, left to right: 317 equal, IoU 0.994, below 0.95: 0
faster_coco_eval, radius 5, upside down: 115 equal, IoU 0.977, below 0.95: 20
faster_coco_eval, radius 16, left to right: 141 equal, IoU 0.998, below 0.95: 0
faster_coco_eval, radius 16, upside down: 9 equal, IoU 0.992, below 0.95: 0
faster_coco_eval, radius 60, left to right: 151 equal, IoU 1.000, below 0.95: 0
faster_coco_eval, radius 60, upside down: 0 equal, IoU 0.998, below 0.95: 0
END
