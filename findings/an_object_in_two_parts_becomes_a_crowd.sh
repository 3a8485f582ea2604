#!/usr/bin/env bash
# supervision: DetectionDataset.as_coco writes iscrowd=1 for an object whose mask has two parts, as that of
# every object behind a post has, or a hole, unless it was read from a COCO file that says otherwise.
# So labels that were made by a model, or read from YOLO or VOC files, have crowd regions that nobody drew:
# COCO's evaluation then counts these objects in neither AP nor AR, and CocoDataset of MMDetection trains
# with them as regions to ignore. Here, one object of three is found, and AP and AR are 1. Up to 0.28,
# `area`, by which COCO sorts objects into small, medium and large ones, is that of the box, too.
# From 0.28 on, iscrowd in the `data` of the Detections is obeyed, as from_coco sets it.
#
# Behaviour seen with supervision 0.25.1, 0.28.0, 0.31.2, pycocotools 2.0.11,
# opencv-python-headless 4.12.0.88, numpy 2.2.6
# Exits with an error if that changes.
set -euo pipefail
folder="$(mktemp -d)"
trap 'rm -rf "$folder"' EXIT
cd "$folder"
"${PYTHON:-python3}" -m venv venv
venv/bin/pip install --quiet --no-compile numpy==2.2.6 scipy==1.17.1 pycocotools==2.0.11 \
    opencv-python-headless==4.12.0.88 pillow==12.2.0 PyYAML==6.0.3 defusedxml==0.7.1 matplotlib==3.10.8 \
    requests==2.33.0 tqdm==4.67.3 pydeprecate==0.10.0
cat > look.py <<'END'
import contextlib
import io
import json
from importlib.metadata import version
from pathlib import Path

import cv2
import numpy as np
import supervision
from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval

cv2.imwrite('a.png', np.zeros((100, 200, 3), np.uint8))
masks = np.zeros((3, 100, 200), bool)
masks[0, 10:40, 10:40] = masks[0, 10:40, 60:90] = True  # two parts
masks[1, 50:90, 10:50] = True
masks[1, 60:80, 20:40] = False  # a hole
masks[2, 10:50, 110:150] = True
boxes = np.array([[10, 10, 90, 40], [10, 50, 50, 90], [110, 10, 150, 50]], float)
supervision.DetectionDataset(classes=['car'], images=['a.png'], annotations={
    'a.png': supervision.Detections(xyxy=boxes, mask=masks, class_id=np.zeros(3, int))
}).as_coco(annotations_path='out.json')
objects = json.loads(Path('out.json').read_text())['annotations']
with contextlib.redirect_stdout(io.StringIO()):
    truth = COCO('out.json')
    found = truth.loadRes([dict(image_id=1, category_id=objects[2]['category_id'], score=.9,
                                bbox=objects[2]['bbox'])])
    evaluation = COCOeval(truth, found, 'bbox')
    evaluation.evaluate()
    evaluation.accumulate()
    evaluation.summarize()
print(version('supervision'), 'iscrowd', *(int(one['iscrowd']) for one in objects),
      'area', *(f'{one["area"]:.0f} of {mask.sum()}' for one, mask in zip(objects, masks)),
      f'AP {evaluation.stats[0]:.2f} AR {evaluation.stats[8]:.2f}')
END
for version in 0.25.1 0.28.0 0.31.2; do
    venv/bin/pip install --quiet --no-compile --no-deps --target "$version" "supervision==$version"
    PYTHONPATH="$version" venv/bin/python -W ignore look.py
done | tee seen
diff seen - <<'END'
0.25.1 iscrowd 1 1 0 area 2400 of 1800 1600 of 1200 1600 of 1600 AP 1.00 AR 1.00
0.28.0 iscrowd 1 1 0 area 2400 of 1800 1600 of 1200 1600 of 1600 AP 1.00 AR 1.00
0.31.2 iscrowd 1 1 0 area 1800 of 1800 1200 of 1200 1600 of 1600 AP 1.00 AR 1.00
END
