#!/usr/bin/env bash
# pycocotools: the first figure, AP, is -1 (which means "no such object") if params.maxDets has no 100,
# because summarize asks for 100 by its number, while AP50 and AP75 beside it take the last of maxDets.
# faster-coco-eval takes the last everywhere. A `save_best` on this figure keeps the first checkpoint
# forever with the one package and works with the other. CocoMetric of MMDetection passes
# `proposal_nums` to maxDets and computes with pycocotools.
#
# Behaviour seen with pycocotools 2.0.11, faster-coco-eval 1.8.0, numpy 2.4.6: AP, AP50 and AP75 of one
# perfect detection
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


def figures(limits, data_type, evaluation_type):
    box = [10., 10., 30., 30.]
    with contextlib.redirect_stdout(io.StringIO()):
        truth = data_type()
        truth.dataset = dict(
            info={}, images=[dict(id=1, width=200, height=50)], categories=[dict(id=1, name='car')],
            annotations=[dict(id=1, image_id=1, category_id=1, bbox=box, area=900., iscrowd=0)])
        truth.createIndex()
        found = truth.loadRes([dict(image_id=1, category_id=1, bbox=box, score=.9)])
        evaluation = evaluation_type(truth, found, 'bbox')
        evaluation.params.maxDets = limits
        evaluation.evaluate()
        evaluation.accumulate()
        evaluation.summarize()
    return ' '.join(f'{value:.2f}' for value in evaluation.stats[:3])


for limits in ([1, 10, 100], [1, 10, 50], [100, 300, 1000]):
    print(f'maxDets {limits}: pycocotools {figures(limits, COCO, COCOeval)}, faster-coco-eval '
          f'{figures(limits, FasterCOCO, COCOeval_faster)}')
END
venv/bin/python -W ignore look.py | tee seen
diff seen - <<'END'
maxDets [1, 10, 100]: pycocotools 1.00 1.00 1.00, faster-coco-eval 1.00 1.00 1.00
maxDets [1, 10, 50]: pycocotools -1.00 1.00 1.00, faster-coco-eval 1.00 1.00 1.00
maxDets [100, 300, 1000]: pycocotools 1.00 1.00 1.00, faster-coco-eval 1.00 1.00 1.00
END
