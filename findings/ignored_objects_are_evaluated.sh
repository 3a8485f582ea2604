#!/usr/bin/env bash
# COCO's flag `ignore` of an annotation has no effect in the evaluation: COCOeval of pycocotools reads
# it and overwrites it in the next line with iscrowd. faster-coco-eval does the same. CocoDataset of
# MMDetection 3.3.0 leaves such annotations out of training (`if ann.get('ignore', False): continue`),
# so a model is trained not to see objects that count as missed when it is evaluated. With iscrowd=1 the
# object counts in neither.
#
# Behaviour seen with pycocotools 2.0.11, faster-coco-eval 1.8.0, numpy 2.4.6: AP and AR where one of
# two objects is found and the other is an ordinary one, has ignore=1, or has iscrowd=1
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


def figures(flags, data_type, evaluation_type):
    boxes = [[10., 10., 30., 30.], [100., 10., 30., 30.]]
    with contextlib.redirect_stdout(io.StringIO()):
        truth = data_type()
        truth.dataset = dict(
            info={}, images=[dict(id=1, width=200, height=50)], categories=[dict(id=1, name='car')],
            annotations=[dict(id=number, image_id=1, category_id=1, bbox=box, area=900.,
                              **{'iscrowd': 0, **own})
                         for number, box, own in zip((1, 2), boxes, ({}, flags))])
        truth.createIndex()
        found = truth.loadRes([dict(image_id=1, category_id=1, bbox=boxes[0], score=.9)])
        evaluation = evaluation_type(truth, found, 'bbox')
        evaluation.evaluate()
        evaluation.accumulate()
        evaluation.summarize()
    return f'AP {evaluation.stats[0]:.2f} AR {evaluation.stats[8]:.2f}'


for name, flags in (('ordinary', {}), ('ignore=1', dict(ignore=1)), ('iscrowd=1', dict(iscrowd=1))):
    print(f'{name}: pycocotools {figures(flags, COCO, COCOeval)}, faster-coco-eval '
          f'{figures(flags, FasterCOCO, COCOeval_faster)}')
END
venv/bin/python -W ignore look.py | tee seen
diff seen - <<'END'
ordinary: pycocotools AP 0.50 AR 0.50, faster-coco-eval AP 0.50 AR 0.50
ignore=1: pycocotools AP 0.50 AR 0.50, faster-coco-eval AP 0.50 AR 0.50
iscrowd=1: pycocotools AP 1.00 AR 1.00, faster-coco-eval AP 1.00 AR 1.00
END
