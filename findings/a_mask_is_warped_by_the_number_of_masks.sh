#!/usr/bin/env bash
# OpenCV 5.0: warpAffine has new kernels for one, three and four channels, and the old one for other
# numbers. Where instance masks are channels of one image, as in BitmapMasks.rotate, shear and translate
# of MMDetection, the same mask is warped to another one if there are two masks in the image and not
# one. Up to 4.14 the number has no effect. Here a rectangle of 5 x 7 pixels is shifted by half a pixel:
# its area is 30 or 40 with INTER_LINEAR, 40 or 35 with INTER_NEAREST.
#
# Behaviour seen with opencv-python-headless 4.14.0.94, 5.0.0.93, numpy 1.26.4, for one to six masks:
# up to 4.14 all areas are 40 (linear) and 35 (nearest); in 5.0, one, three and four masks have areas of
# their own
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

mask = np.zeros((12, 12), np.uint8)
mask[3:8, 2:9] = 1
shift = np.float32([[1, 0, .5], [0, 1, 0]])
for name, method in (('linear', cv2.INTER_LINEAR), ('nearest', cv2.INTER_NEAREST)):
    areas = []
    for count in range(1, 7):
        masks = np.stack([mask] * count, axis=-1)
        warped = cv2.warpAffine(masks, shift, (12, 12), flags=method)
        areas.append(int(warped.reshape(12, 12, count)[..., 0].sum()))
    print(cv2.__version__, name, 'areas of the first of 1, 2, 3, 4, 5, 6 masks:', *areas)
END
for version in 4.14.0.94 5.0.0.93; do
    venv/bin/pip install --quiet --no-compile --no-deps --target "$version" \
        "opencv-python-headless==$version"
    PYTHONPATH="$version" venv/bin/python look.py
done | tee seen
diff seen - <<'END'
4.14.0 linear areas of the first of 1, 2, 3, 4, 5, 6 masks: 40 40 40 40 40 40
4.14.0 nearest areas of the first of 1, 2, 3, 4, 5, 6 masks: 35 35 35 35 35 35
5.0.0 linear areas of the first of 1, 2, 3, 4, 5, 6 masks: 30 40 30 30 40 40
5.0.0 nearest areas of the first of 1, 2, 3, 4, 5, 6 masks: 40 35 40 40 35 35
END
