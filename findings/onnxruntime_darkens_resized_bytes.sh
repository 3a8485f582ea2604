#!/usr/bin/env bash
# ONNX Runtime: Resize of an 8-bit image with mode=linear cuts off the fraction of each value, so images
# are darker by 0.5 of 255 on average than the same Resize of the same values in float32. With
# antialias=1 the same operator is not darker. torch rounds: torch.nn.functional.interpolate of bytes,
# which torch.onnx.export writes as this operator, is darker by 0.5 after the export. So a model that is
# exported with a preprocessing that resizes bytes sees other images than in training. A Cast to float
# in front of the Resize keeps the values.
#
# Behaviour seen with onnxruntime 1.32.0, onnx 1.23.2, numpy 2.4.6: an image of random bytes, 64 x 64, is
# resized as bytes and in float32
# Exits with an error if that changes.
set -euo pipefail
folder="$(mktemp -d)"
trap 'rm -rf "$folder"' EXIT
cd "$folder"
"${PYTHON:-python3}" -m venv venv
venv/bin/pip install --quiet --no-compile onnxruntime==1.32.0 onnx==1.23.2 numpy==2.4.6
cat > look.py <<'END'
import numpy as np
import onnx
import onnxruntime
from onnx import helper

SIDE = 64


def resized(image, side, **settings):
    kind = helper.np_dtype_to_tensor_dtype(image.dtype)
    graph = helper.make_graph(
        [helper.make_node('Resize', ['image', '', '', 'sizes'], ['out'], mode='linear', **settings)],
        'resize', [helper.make_tensor_value_info('image', kind, image.shape)],
        [helper.make_tensor_value_info('out', kind, None)],
        [helper.make_tensor('sizes', onnx.TensorProto.INT64, [4], [1, 3, side, side])])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid('', 18)], ir_version=9)
    session = onnxruntime.InferenceSession(
        model.SerializeToString(), providers=['CPUExecutionProvider'])
    return session.run(None, dict(image=image))[0].astype(np.float32)


image = np.random.RandomState(0).randint(0, 256, (1, 3, SIDE, SIDE)).astype(np.uint8)
for side in (40, 100):
    for antialias in (0, 1):
        exact = resized(image.astype(np.float32), side, antialias=antialias)
        change = resized(image, side, antialias=antialias) - exact
        print(f'to {side}, antialias={antialias}: darker by {np.round(-change.mean(), 1) + 0.:.1f} on '
              f'average; no value is brighter: {bool((change <= 0).all())}')
END
venv/bin/python -W ignore look.py | tee seen
diff seen - <<'END'
to 40, antialias=0: darker by 0.5 on average; no value is brighter: True
to 40, antialias=1: darker by 0.0 on average; no value is brighter: False
to 100, antialias=0: darker by 0.5 on average; no value is brighter: True
to 100, antialias=1: darker by 0.0 on average; no value is brighter: False
END
