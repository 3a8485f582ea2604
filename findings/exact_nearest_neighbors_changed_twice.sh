#!/usr/bin/env bash
# OpenCV: INTER_NEAREST_EXACT is documented as "bit exact nearest neighbor interpolation. This will
# produce same results as the nearest neighbor method in PIL, scikit-image or Matlab". It took other
# pixels in 4.8 than before, and others again in 5.0; only 5.0 takes those of Pillow at every size.
# INTER_NEAREST, which Resize of MMDetection uses for label maps and masks, stayed as it was and takes
# other pixels than Pillow: with backend='pillow' a label map is moved by up to a pixel.
#
# Behaviour seen with opencv-python-headless 4.7.0.72, 4.14.0.94, 5.0.0.93, pillow 12.2.0, numpy 1.26.4:
# a row of 16 pixels is resized to 1, 2, ..., 39 pixels; printed is at how many of the 39 sizes OpenCV
# takes other pixels than Pillow, and what it takes for 8
# Exits with an error if that changes.
set -euo pipefail
folder="$(mktemp -d)"
trap 'rm -rf "$folder"' EXIT
cd "$folder"
"${PYTHON:-python3}" -m venv venv
venv/bin/pip install --quiet --no-compile numpy==1.26.4 pillow==12.2.0
cat > look.py <<'END'
import cv2
import numpy as np
from PIL import Image

row = np.arange(16, dtype=np.uint8)[None].repeat(2, axis=0)
for name, method in (('exact', cv2.INTER_NEAREST_EXACT), ('nearest', cv2.INTER_NEAREST)):
    found = {size: cv2.resize(row, (size, 2), interpolation=method)[0] for size in range(1, 40)}
    others = sum(not np.array_equal(pixels, np.asarray(
        Image.fromarray(row).resize((size, 2), Image.Resampling.NEAREST))[0])
        for size, pixels in found.items())
    print(cv2.__version__, name, f'unlike Pillow at {others} sizes; to 8:', *found[8])
END
for version in 4.7.0.72 4.14.0.94 5.0.0.93; do
    venv/bin/pip install --quiet --no-compile --no-deps --target "$version" \
        "opencv-python-headless==$version"
    PYTHONPATH="$version" venv/bin/python look.py
done | tee seen
diff seen - <<'END'
4.7.0 exact unlike Pillow at 25 sizes; to 8: 0 2 4 6 8 10 12 14
4.7.0 nearest unlike Pillow at 37 sizes; to 8: 0 2 4 6 8 10 12 14
4.14.0 exact unlike Pillow at 20 sizes; to 8: 1 3 5 7 9 11 13 15
4.14.0 nearest unlike Pillow at 37 sizes; to 8: 0 2 4 6 8 10 12 14
5.0.0 exact unlike Pillow at 0 sizes; to 8: 1 3 5 7 9 11 13 15
5.0.0 nearest unlike Pillow at 37 sizes; to 8: 0 2 4 6 8 10 12 14
END
