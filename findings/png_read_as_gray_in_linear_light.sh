#!/usr/bin/env bash
# OpenCV: a color PNG that names its color space (a gAMA or sRGB chunk, which many programs write)
# becomes gray in linear light when it is read with IMREAD_GRAYSCALE, because libpng converts it. The
# same pixels without the chunk, cvtColor of the image read in color, and the documentation ("convert
# image to the single channel grayscale image (codec internal conversion)" is all that it says) weigh
# the values as they are stored. In MMDetection, color_type='grayscale' gives images that differ by up
# to 71 of 255 between two files of equal pixels, and from RandomGrayscale of the color image.
#
# Behaviour seen with opencv-python-headless 4.5.5.64, 4.12.0.88, 5.0.0.93, numpy 1.26.4: red, green and
# blue are gray 76, 149, 29 without the chunk, and 147, 200, 95 with it
# Exits with an error if that changes.
set -euo pipefail
folder="$(mktemp -d)"
trap 'rm -rf "$folder"' EXIT
cd "$folder"
"${PYTHON:-python3}" -m venv venv
venv/bin/pip install --quiet --no-compile numpy==1.26.4
cat > look.py <<'END'
import struct
import zlib

import cv2
import numpy as np


def png(pixels, chunks):
    """Return a PNG file with these chunks in front of the pixels (RGB)."""
    height, width = pixels.shape[:2]
    header = struct.pack('>IIBBBBB', width, height, 8, 2, 0, 0, 0)
    rows = zlib.compress(b''.join(b'\0' + row.tobytes() for row in pixels))
    return b'\x89PNG\r\n\x1a\n' + b''.join(
        struct.pack('>I', len(data)) + name + data + struct.pack('>I', zlib.crc32(name + data))
        for name, data in ((b'IHDR', header), *chunks, (b'IDAT', rows), (b'IEND', b'')))


colors = np.array([[[255, 0, 0], [0, 255, 0], [0, 0, 255]]], np.uint8)
for name, chunks in (('no chunk', ()), ('gAMA', [(b'gAMA', struct.pack('>I', 45455))]),
                     ('sRGB', [(b'sRGB', b'\0')])):
    file = np.frombuffer(png(colors, chunks), np.uint8)
    print(cv2.__version__, f'{name}:', *cv2.imdecode(file, cv2.IMREAD_GRAYSCALE)[0])
END
for version in 4.5.5.64 4.12.0.88 5.0.0.93; do
    venv/bin/pip install --quiet --no-compile --no-deps --target "$version" \
        "opencv-python-headless==$version"
    PYTHONPATH="$version" venv/bin/python look.py
done | tee seen
diff seen - <<'END'
4.5.5 no chunk: 76 149 29
4.5.5 gAMA: 147 200 95
4.5.5 sRGB: 147 200 95
4.12.0 no chunk: 76 149 29
4.12.0 gAMA: 147 200 95
4.12.0 sRGB: 147 200 95
5.0.0 no chunk: 76 149 29
5.0.0 gAMA: 147 200 95
5.0.0 sRGB: 147 200 95
END
