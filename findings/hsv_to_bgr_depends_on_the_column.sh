#!/usr/bin/env bash
# OpenCV: an 8-bit HSV image is converted to BGR by other arithmetic in the last columns of a row, which
# do not fill a vector register, than elsewhere: most colors give other bytes there (by 1 of 255). In an
# image of 67 equal columns, the last three differ. So YOLOXHSVRandomAug of a flipped image is not the
# flipped result of the image, unless the width is a multiple of the width of the registers, and a crop
# has other bytes than the same part of the image. BGR to HSV does not depend on the column.
#
# Behaviour seen with opencv-python-headless 4.5.5.64, 5.0.0.93, numpy 1.26.4 (with AVX2, and with
# OPENCV_CPU_DISABLE=AVX2,FP16,FMA3,AVX)
# Exits with an error if that changes.
set -euo pipefail
folder="$(mktemp -d)"
trap 'rm -rf "$folder"' EXIT
cd "$folder"
"${PYTHON:-python3}" -m venv venv
venv/bin/pip install --quiet --no-compile numpy==1.26.4
cat > look.py <<'END'
import cv2
import numpy as np

cv2.setNumThreads(1)
colors = np.stack(np.meshgrid(np.arange(0, 180, 4), np.arange(1, 256, 6), np.arange(1, 256, 6)),
                  axis=-1).reshape(-1, 1, 3).astype(np.uint8)
for name, code in (('HSV to BGR', cv2.COLOR_HSV2BGR), ('BGR to HSV', cv2.COLOR_BGR2HSV)):
    result = cv2.cvtColor(colors.repeat(67, axis=1), code).astype(int)
    change = np.abs(result - result[:, :1]).max(axis=-1)
    print(cv2.__version__, f'{name}: columns that differ {np.flatnonzero(change.any(axis=0))}, by up '
          f'to {change.max()}; most colors do: {bool(change.any(axis=1).mean() > .5)}')
END
for version in 4.5.5.64 5.0.0.93; do
    venv/bin/pip install --quiet --no-compile --no-deps --target "$version" \
        "opencv-python-headless==$version"
    PYTHONPATH="$version" venv/bin/python look.py
done | tee seen
diff seen - <<'END'
4.5.5 HSV to BGR: columns that differ [64 65 66], by up to 1; most colors do: True
4.5.5 BGR to HSV: columns that differ [], by up to 0; most colors do: False
5.0.0 HSV to BGR: columns that differ [64 65 66], by up to 1; most colors do: True
5.0.0 BGR to HSV: columns that differ [], by up to 0; most colors do: False
END
