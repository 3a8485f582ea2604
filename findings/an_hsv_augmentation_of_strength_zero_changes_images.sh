#!/usr/bin/env bash
# OpenCV: an 8-bit image that is converted to HSV and back is not the same image: hue has 180 values and
# saturation 256, so most pixels come back with other values, some by more than 4 of 255.
# YOLOXHSVRandomAug of MMDetection (and the HSV augmentations of YOLO libraries) convert every image in
# this way, with strengths that can be zero: "no augmentation" of this transform differs from leaving it
# out. In float32 the round trip gives every value back. 256 values of hue (COLOR_BGR2HSV_FULL) do not
# help.
#
# Behaviour seen with opencv-python-headless 4.5.5.64, 5.0.0.93, numpy 1.26.4, for all colors with
# values that are multiples of 5
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
levels = np.arange(0, 256, 5, dtype=np.uint8)
colors = np.stack(np.meshgrid(levels, levels, levels), axis=-1).reshape(-1, len(levels), 3)


def trip(image, there, back):
    again = cv2.cvtColor(cv2.cvtColor(image, there), back)
    if image.dtype == np.float32:
        again = again.round()
    change = np.abs(again.astype(int) - image.astype(int)).max(axis=-1)
    return (f'some change: {bool(change.any())}, most change: {bool((change > 0).mean() > .5)}, '
            f'by over 4: {bool((change > 4).any())}')


print(cv2.__version__, '8 bits:', trip(colors, cv2.COLOR_BGR2HSV, cv2.COLOR_HSV2BGR))
print(cv2.__version__, '8 bits, FULL:', trip(
    colors, cv2.COLOR_BGR2HSV_FULL, cv2.COLOR_HSV2BGR_FULL))
print(cv2.__version__, 'float32:', trip(
    colors.astype(np.float32), cv2.COLOR_BGR2HSV, cv2.COLOR_HSV2BGR))
END
for version in 4.5.5.64 5.0.0.93; do
    venv/bin/pip install --quiet --no-compile --no-deps --target "$version" \
        "opencv-python-headless==$version"
    PYTHONPATH="$version" venv/bin/python look.py
done | tee seen
diff seen - <<'END'
4.5.5 8 bits: some change: True, most change: True, by over 4: True
4.5.5 8 bits, FULL: some change: True, most change: True, by over 4: True
4.5.5 float32: some change: False, most change: False, by over 4: False
5.0.0 8 bits: some change: True, most change: True, by over 4: True
5.0.0 8 bits, FULL: some change: True, most change: True, by over 4: True
5.0.0 float32: some change: False, most change: False, by over 4: False
END
