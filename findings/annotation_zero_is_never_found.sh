#!/usr/bin/env bash
# pycocotools and faster-coco-eval: an object whose annotation has id 0 is never found. For each
# detection, evaluateImg stores the id of the object that it matches and reads 0 as "no match": a
# detection with exactly the box of the object is a false positive, and the object is missed. Files
# whose ids begin at 0 are common; the AP of perfect detections is then below 1, by more the fewer
# objects a class has. CocoMetric of MMDetection evaluates the ids of the annotation file.
#
# Behaviour seen with pycocotools 2.0.11, faster-coco-eval 1.8.0, numpy 2.4.6: AP of four perfect
# detections of one class
# Exits with an error if that changes.
set -euo pipefail
folder="$(mktemp -d)"
trap 'rm -rf "$folder"' EXIT
cd "$folder"
"${PYTHON:-python3}" -m venv venv
venv/bin/pip install --quiet --no-compile numpy==2.4.6 pycocotools==2.0.11 faster-coco-eval==1.8.0
cat > look.py <<'END'
import contextlib
import io

from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval
from faster_coco_eval import COCO as FasterCOCO
from faster_coco_eval import COCOeval_faster


def ap(first, data_type, evaluation_type):
    boxes = [[10. + 40 * number, 10., 30., 30.] for number in range(4)]
    with contextlib.redirect_stdout(io.StringIO()):
        truth = data_type()
        truth.dataset = dict(
            info={}, images=[dict(id=1, width=200, height=50)], categories=[dict(id=1, name='car')],
            annotations=[dict(id=first + number, image_id=1, category_id=1, bbox=box, area=900.,
                              iscrowd=0) for number, box in enumerate(boxes)])
        truth.createIndex()
        found = truth.loadRes([dict(image_id=1, category_id=1, bbox=box, score=.9 - number / 10)
                               for number, box in enumerate(boxes)])
        evaluation = evaluation_type(truth, found, 'bbox')
        evaluation.evaluate()
        evaluation.accumulate()
        evaluation.summarize()
    return evaluation.stats[0]


for first in (1, 0):
    print(f'ids from {first}: pycocotools {ap(first, COCO, COCOeval):.3f}, faster-coco-eval '
          f'{ap(first, FasterCOCO, COCOeval_faster):.3f}')
END
venv/bin/python -W ignore look.py | tee seen
diff seen - <<'END'
ids from 1: pycocotools 1.000, faster-coco-eval 1.000
ids from 0: pycocotools 0.564, faster-coco-eval 0.564
END
