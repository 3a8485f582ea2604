#!/usr/bin/env bash
# OpenCV: cv2.resize of an 8-bit image with INTER_CUBIC gives other bytes on another CPU. It goes through
# Intel's IPP, which has kernels for each generation of instructions. In 5.0 those of SSE4.2, AVX2, AVX-512
# (Skylake) and AVX-512 (Ice Lake) all differ, by up to 1 of 255 in a few of a million values; OPENCV_IPP
# chooses an older generation and shows it on one machine. 4.13 ignores it on a CPU of Intel (there all
# settings gave the bytes of AVX-512) and heeds it on one of AMD. Without IPP, more values differ.
# INTER_NEAREST, INTER_LINEAR, INTER_AREA and INTER_LANCZOS4 do not depend on any of this. So
# Resize(interpolation='bicubic') of MMDetection loads other images on a CPU with AVX-512 than on one
# without.
#
# Behaviour seen with opencv-python-headless 5.0.0.93, numpy 1.26.4 (and 4.13.0.92 on both CPUs)
# Exits with an error if that changes. Needs a CPU with AVX2.
set -euo pipefail
folder="$(mktemp -d)"
trap 'rm -rf "$folder"' EXIT
cd "$folder"
"${PYTHON:-python3}" -m venv venv
venv/bin/pip install --quiet --no-compile numpy==1.26.4
venv/bin/pip install --quiet --no-compile --no-deps opencv-python-headless==5.0.0.93
cat > resized.py <<'END'
import sys

import cv2
import numpy as np

cv2.setNumThreads(1)
image = np.random.RandomState(0).randint(0, 256, (480, 640, 3), np.uint8)
sizes = (333, 250), (800, 600), (1333, 1000)
names = 'NEAREST', 'LINEAR', 'AREA', 'LANCZOS4', 'CUBIC'
np.savez(sys.argv[1], **{name: np.concatenate([
    cv2.resize(image, size, interpolation=getattr(cv2, f'INTER_{name}')).ravel() for size in sizes])
    for name in names})
END
cat > compared.py <<'END'
import cv2
import numpy as np

with np.load('avx2.npz') as avx2, np.load('sse42.npz') as sse42, np.load('disabled.npz') as without:
    for name in avx2:
        change = np.abs(avx2[name].astype(int) - sse42[name])
        print(cv2.__version__, f'{name}: SSE4.2 and AVX2 differ by up to {change.max()}, in few of '
              f'a million values: {bool(0 < change.mean() < 1e-4)}; other bytes without IPP: '
              f'{bool((avx2[name] != without[name]).any())}')
END
for level in avx2 sse42 disabled; do
    OPENCV_IPP="$level" venv/bin/python resized.py "$level.npz" 2> errors
done
venv/bin/python compared.py | tee seen
diff seen - <<'END'
5.0.0 NEAREST: SSE4.2 and AVX2 differ by up to 0, in few of a million values: False; other bytes without IPP: False
5.0.0 LINEAR: SSE4.2 and AVX2 differ by up to 0, in few of a million values: False; other bytes without IPP: False
5.0.0 AREA: SSE4.2 and AVX2 differ by up to 0, in few of a million values: False; other bytes without IPP: False
5.0.0 LANCZOS4: SSE4.2 and AVX2 differ by up to 0, in few of a million values: False; other bytes without IPP: False
5.0.0 CUBIC: SSE4.2 and AVX2 differ by up to 1, in few of a million values: True; other bytes without IPP: True
END
