#!/usr/bin/env bash
# mmdet 3.3.0: torch.onnx.export of a model that decodes boxes and clips them to the image ends with
# ModuleNotFoundError. Under an export by tracing, `distance2bbox` (FCOS, ATSS, RTMDet, ...),
# `DeltaXYWHBBoxCoder` (RetinaNet, Faster R-CNN, ...) and `TBLRBBoxCoder` import `mmdet.core.export`,
# a package of MMDetection 2.x that 3.x does not have. torch.jit.trace of the same model works, and so
# does an export without clipping.
#
# Behaviour seen with mmdet 3.3.0, mmengine 0.10.7, mmcv-lite 2.1.0, torch 2.13.0, onnx 1.23.2:
#   traced: the same boxes
#   exported, clipped: ModuleNotFoundError: No module named 'mmdet.core'
#   exported, not clipped: written
# Exits with an error if that changes.
set -euo pipefail
folder="$(mktemp -d)"
trap 'rm -rf "$folder"' EXIT
cd "$folder"
"${PYTHON:-python3}" -m venv venv
venv/bin/pip install --quiet torch==2.13.0 mmdet==3.3.0 mmengine==0.10.7 mmcv-lite==2.1.0 \
    onnx==1.23.2 'setuptools<82'
cat > look.py <<'END'
import sys
import types

import torch


class NotCalled(types.ModuleType):
    """The compiled operators of mmcv, of which decoding boxes needs none."""

    def __getattr__(self, name):
        if name.startswith('__'):
            raise AttributeError(name)
        return lambda *args, **kwargs: sys.exit(f'{name} was called')


sys.modules['mmcv._ext'] = NotCalled('mmcv._ext')
from mmdet.structures.bbox import distance2bbox


class Decodes(torch.nn.Module):
    def __init__(self, size):
        super().__init__()
        self.size = size

    def forward(self, points, distances):
        return distance2bbox(points, distances, max_shape=self.size)


inputs = torch.rand(5, 2) * 32, torch.rand(5, 4) * 9
clipped = Decodes((32, 32))
traced = torch.jit.trace(clipped, inputs)
print('traced:', 'the same boxes' if torch.equal(traced(*inputs), clipped(*inputs)) else 'others')
for name, model in (('clipped', clipped), ('not clipped', Decodes(None))):
    try:
        torch.onnx.export(model, inputs, 'boxes.onnx', dynamo=False, opset_version=17)
        result = 'written'
    except ModuleNotFoundError as error:
        result = f'{type(error).__name__}: {error}'
    print(f'exported, {name}:', result)
END
venv/bin/python -W ignore look.py | tee seen
diff seen - <<'END'
traced: the same boxes
exported, clipped: ModuleNotFoundError: No module named 'mmdet.core'
exported, not clipped: written
END
