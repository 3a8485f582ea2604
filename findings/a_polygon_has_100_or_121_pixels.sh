#!/usr/bin/env bash
# The polygon of a box of 10 x 10 pixels is 100 pixels by pycocotools (which makes the masks of
# MMDetection), and 121 by OpenCV's fillPoly and Pillow's ImageDraw.polygon (which programs for labels
# and other datasets use): the latter two paint the border on all sides. A mask that is made by the one
# and evaluated against the other is never a perfect one: IoU 0.83 for the box, so the detection is a
# miss at the thresholds 0.85, 0.90 and 0.95 of COCO's AP. cv2.contourArea of the same polygon is 100.
#
# Behaviour seen with pycocotools 2.0.11, opencv-python-headless 4.12.0.88, pillow 12.2.0, numpy 2.2.6
# Exits with an error if that changes.
set -euo pipefail
folder="$(mktemp -d)"
trap 'rm -rf "$folder"' EXIT
cd "$folder"
"${PYTHON:-python3}" -m venv venv
venv/bin/pip install --quiet --no-compile numpy==2.2.6 pycocotools==2.0.11 \
    opencv-python-headless==4.12.0.88 pillow==12.2.0
cat > look.py <<'END'
import cv2
import numpy as np
from PIL import Image, ImageDraw
from pycocotools import mask

for name, points in (('box', [(10, 10), (20, 10), (20, 20), (10, 20)]),
                     ('triangle', [(10, 10), (30, 10), (10, 30)])):
    flat = [float(value) for point in points for value in point]
    coco = mask.decode(mask.frPyObjects([flat], 50, 50))[..., 0]
    opencv = cv2.fillPoly(np.zeros((50, 50), np.uint8), [np.array(points)], 1)
    image = Image.new('L', (50, 50))
    ImageDraw.Draw(image).polygon(points, fill=1)
    pillow = np.asarray(image)
    iou = (coco & opencv).sum() / (coco | opencv).sum()
    print(f'{name}: pycocotools {coco.sum()}, OpenCV {opencv.sum()}, Pillow {pillow.sum()}; '
          f'contourArea {cv2.contourArea(np.array(points)):.0f}; IoU of the first two {iou:.2f}')
END
venv/bin/python -W ignore look.py | tee seen
diff seen - <<'END'
box: pycocotools 100, OpenCV 121, Pillow 121; contourArea 100; IoU of the first two 0.83
triangle: pycocotools 190, OpenCV 231, Pillow 231; contourArea 200; IoU of the first two 0.82
END
