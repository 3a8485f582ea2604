#!/usr/bin/env bash
# mmdet 3.3.0: eval_map, with which VOCMetric and OpenImagesMetric compute, compares the IoU of a
# detection, one float32 number, with the threshold, a float of Python. NumPy below 2.0 compares the two
# in float64, NumPy 2.0 and later in float32. 0.7 is above the float32 next to it, and so are 0.65, 0.9 and
# 0.95: an IoU of exactly 7/10, as between boxes of whole pixels, misses the threshold 0.7 up to NumPy 1.26
# and meets it from 2.0 on. The figures of equal detections change with NumPy at these thresholds, not
# at 0.5 and 0.75.
#
# Behaviour seen with mmdet 3.3.0, mmengine 0.10.7, mmcv-lite 2.1.0, torch 2.13.0, numpy 1.26.4, 2.4.6: AP
# of one detection whose IoU is the threshold
# Exits with an error if that changes.
set -euo pipefail
folder="$(mktemp -d)"
trap 'rm -rf "$folder"' EXIT
cd "$folder"
"${PYTHON:-python3}" -m venv venv
venv/bin/pip install --quiet --no-compile torch==2.13.0 mmdet==3.3.0 mmengine==0.10.7 \
    mmcv-lite==2.1.0 numpy==2.4.6 'setuptools<82'
cat > look.py <<'END'
import sys
import types

import numpy as np


class NotCalled(types.ModuleType):
    """The compiled operators of mmcv, of which evaluating boxes needs none."""

    def __getattr__(self, name):
        if name.startswith('__'):
            raise AttributeError(name)
        return lambda *args, **kwargs: sys.exit(f'{name} was called')


sys.modules['mmcv._ext'] = NotCalled('mmcv._ext')
from mmdet.evaluation import eval_map

truth = dict(bboxes=np.array([[0, 0, 100, 100]], np.float32), labels=np.array([0]))
figures = []
for percent in range(50, 100, 5):
    found = np.array([[0, 0, 100, percent, .9]], np.float32)
    ap, _ = eval_map([[found]], [truth], iou_thr=percent / 100, logger='silent', nproc=1)
    figures.append(f'{percent / 100} {ap:.0f}')
print(f'NumPy {np.__version__}:', ', '.join(figures))
END
for version in 1.26.4 2.4.6; do
    venv/bin/pip install --quiet --no-compile --no-deps --target "$version" "numpy==$version"
    PYTHONPATH="$version" venv/bin/python -W ignore look.py
done | tee seen
diff seen - <<'END'
NumPy 1.26.4: 0.5 1, 0.55 1, 0.6 1, 0.65 0, 0.7 0, 0.75 1, 0.8 1, 0.85 1, 0.9 0, 0.95 0
NumPy 2.4.6: 0.5 1, 0.55 1, 0.6 1, 0.65 1, 0.7 1, 0.75 1, 0.8 1, 0.85 1, 0.9 1, 0.95 1
END
