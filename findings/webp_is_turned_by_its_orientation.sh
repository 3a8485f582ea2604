#!/usr/bin/env bash
# OpenCV: the orientation that EXIF stores turns JPEG and PNG images when they are read in color. WebP
# images are turned from 4.13 on and were not before; the reading flags and mmcv are the same. A COCO
# dataset of WebP photographs whose boxes were drawn by a program that ignored the orientation, as
# OpenCV did, has its boxes in the wrong places after the upgrade, without a message (LoadImageFromFile
# does not compare sizes with the annotations). IMREAD_IGNORE_ORIENTATION, in MMDetection
# color_type='color_ignore_orientation', keeps the old result.
#
# Behaviour seen with opencv-python-headless 4.12.0.88, 4.13.0.92, 5.0.0.93, pillow 12.2.0, numpy
# 1.26.4:
# heights and widths of an image of 20 x 40 pixels with orientation 6 (turn by 90 degrees)
# Exits with an error if that changes.
set -euo pipefail
folder="$(mktemp -d)"
trap 'rm -rf "$folder"' EXIT
cd "$folder"
"${PYTHON:-python3}" -m venv venv
venv/bin/pip install --quiet --no-compile numpy==1.26.4 pillow==12.2.0
cat > look.py <<'END'
import io

import cv2
import numpy as np
from PIL import Image

exif = Image.Exif()
exif[0x0112] = 6
for kind in ('JPEG', 'PNG', 'WEBP'):
    file = io.BytesIO()
    Image.new('RGB', (40, 20)).save(file, kind, exif=exif.tobytes())
    content = np.frombuffer(file.getvalue(), np.uint8)
    sizes = [cv2.imdecode(content, flag).shape[:2] for flag in (
        cv2.IMREAD_COLOR, cv2.IMREAD_COLOR | cv2.IMREAD_IGNORE_ORIENTATION)]
    print(cv2.__version__, kind, 'color: %d x %d,' % sizes[0], 'ignoring it: %d x %d' % sizes[1])
END
for version in 4.12.0.88 4.13.0.92 5.0.0.93; do
    venv/bin/pip install --quiet --no-compile --no-deps --target "$version" \
        "opencv-python-headless==$version"
    PYTHONPATH="$version" venv/bin/python look.py
done | tee seen
diff seen - <<'END'
4.12.0 JPEG color: 40 x 20, ignoring it: 20 x 40
4.12.0 PNG color: 40 x 20, ignoring it: 20 x 40
4.12.0 WEBP color: 20 x 40, ignoring it: 20 x 40
4.13.0 JPEG color: 40 x 20, ignoring it: 20 x 40
4.13.0 PNG color: 40 x 20, ignoring it: 20 x 40
4.13.0 WEBP color: 40 x 20, ignoring it: 20 x 40
5.0.0 JPEG color: 40 x 20, ignoring it: 20 x 40
5.0.0 PNG color: 40 x 20, ignoring it: 20 x 40
5.0.0 WEBP color: 40 x 20, ignoring it: 20 x 40
END
