#!/usr/bin/env bash
# torchmetrics: MeanAveragePrecision evaluates with pycocotools (or faster-coco-eval) and still has other
# figures, because it makes COCO's ten IoU thresholds and 101 recall thresholds in float32: 0.6 becomes
# 0.6000000238, 0.35 becomes 0.3499999940. An IoU or a recall that is such a fraction, as with boxes of
# whole pixels or a class of 10 or 100 objects, lies on the other side. One detection with an IoU of
# exactly 0.6 is no hit at 0.6, so its AP is 0.2 and not 0.3. With 100 objects, one in each image, AP
# changes by 0.1 and AP50 by 0.7 points. Given the same thresholds in float64, it has the
# figures of pycocotools.
#
# Behaviour seen with torchmetrics 1.9.0, pycocotools 2.0.11, faster-coco-eval 1.8.0, torch 2.13.0, numpy
# 2.4.6. torchmetrics asks for torchvision, of which boxes that are given as x, y, width, height need
# nothing: a stand-in returns them.
# Exits with an error if that changes.
set -euo pipefail
folder="$(mktemp -d)"
trap 'rm -rf "$folder"' EXIT
cd "$folder"
"${PYTHON:-python3}" -m venv venv
venv/bin/pip install --quiet --no-compile torch==2.13.0 torchmetrics==1.9.0 numpy==2.4.6 \
    pycocotools==2.0.11 faster-coco-eval==1.8.0
cat > look.py <<'END'
import contextlib
import io
import sys
import types

import numpy as np
import torch
import torchmetrics  # before the stand-in
from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval
from torchmetrics.utilities import imports


def box_convert(boxes, in_fmt, out_fmt):
    assert in_fmt == out_fmt
    return boxes


for name in ('torchvision', 'torchvision.ops'):
    sys.modules[name] = types.ModuleType(name)
sys.modules['torchvision.ops'].box_convert = box_convert
imports._TORCHVISION_AVAILABLE = True
from torchmetrics.detection.mean_ap import MeanAveragePrecision

EXACT = dict(iou_thresholds=np.linspace(.5, .95, 10).tolist(),
             rec_thresholds=np.linspace(0, 1, 101).tolist())


def of_pycocotools(objects, found):
    with contextlib.redirect_stdout(io.StringIO()):
        truth = COCO()
        truth.dataset = dict(
            info={}, images=[dict(id=number, width=200, height=200) for number in range(len(objects))],
            categories=[dict(id=1, name='car')],
            annotations=[dict(id=number + 1, image_id=number, category_id=1, bbox=box,
                              area=box[2] * box[3], iscrowd=0) for number, box in enumerate(objects)])
        truth.createIndex()
        results = truth.loadRes([dict(image_id=number, category_id=1, bbox=box, score=score)
                                 for number, (box, score) in enumerate(found)])
        evaluation = COCOeval(truth, results, 'bbox')
        evaluation.evaluate()
        evaluation.accumulate()
        evaluation.summarize()
    return evaluation.stats[0], evaluation.stats[1]


def of_torchmetrics(objects, found, backend='pycocotools', **thresholds):
    metric = MeanAveragePrecision(box_format='xywh', backend=backend, **thresholds)
    label = torch.ones(1, dtype=torch.int)
    metric.update([dict(boxes=torch.tensor([box]), scores=torch.tensor([score]), labels=label)
                   for box, score in found],
                  [dict(boxes=torch.tensor([box]), labels=label) for box in objects])
    return metric.compute()['map'], metric.compute()['map_50']


def say(name, objects, found):
    for library, (ap, ap50) in (
            ('pycocotools', of_pycocotools(objects, found)),
            ('torchmetrics', of_torchmetrics(objects, found)),
            ('torchmetrics with faster-coco-eval', of_torchmetrics(
                objects, found, 'faster_coco_eval')),
            ('torchmetrics, thresholds in float64', of_torchmetrics(objects, found, **EXACT))):
        print(f'{name}, {library}: AP {ap:.4f} AP50 {ap50:.4f}')


say('IoU 0.6', [[0., 0., 100., 100.]], [([0., 0., 60., 100.], .9)])
# one box in each of 100 images, shifted by 0 to 69 of 150 pixels
numbers = np.arange(100)
scores = np.random.RandomState(0).permutation(100) / 128  # exact in float32 as well
say('100 objects', [[0., 0., 150., 100.] for _ in numbers],
    [([float(number * 37 % 70), 0., 150., 100.], float(score))
     for number, score in zip(numbers, scores)])
END
venv/bin/python -W ignore look.py | tee seen
diff seen - <<'END'
IoU 0.6, pycocotools: AP 0.3000 AP50 1.0000
IoU 0.6, torchmetrics: AP 0.2000 AP50 1.0000
IoU 0.6, torchmetrics with faster-coco-eval: AP 0.2000 AP50 1.0000
IoU 0.6, torchmetrics, thresholds in float64: AP 0.3000 AP50 1.0000
100 objects, pycocotools: AP 0.2099 AP50 0.5894
100 objects, torchmetrics: AP 0.2086 AP50 0.5820
100 objects, torchmetrics with faster-coco-eval: AP 0.2086 AP50 0.5820
100 objects, torchmetrics, thresholds in float64: AP 0.2099 AP50 0.5894
END
