#!/usr/bin/env bash
# albumentations 1.4.0 to 1.4.4: Blur and MedianBlur draw the size of their kernel from blur_limit and
# then use 3 pixels whatever was drawn: get_params calls it "ksize", and apply expects "kernel" and has
# 3 as its default. Versions before and from 1.4.6 on use what was drawn. No error or warning says so; a
# config with blur_limit=7 is trained with weaker augmentation.
#
# Behaviour seen with albumentations 1.3.1, 1.4.0, 1.4.4, 1.4.6, opencv-python-headless 4.12.0.88,
# numpy 1.26.4
# Exits with an error if that changes.
set -euo pipefail
folder="$(mktemp -d)"
trap 'rm -rf "$folder"' EXIT
cd "$folder"
"${PYTHON:-python3}" -m venv venv
venv/bin/pip install --quiet --no-compile --only-binary :all: numpy==1.26.4 scipy==1.13.1 \
    scikit-image==0.24.0 scikit-learn==1.5.2 pydantic==2.12.5 PyYAML==6.0.3 qudida==0.0.4
venv/bin/pip install --quiet --no-compile --no-deps opencv-python-headless==4.12.0.88
cat > look.py <<'END'
import albumentations
import cv2
import numpy as np

image = np.random.RandomState(0).randint(0, 256, (32, 32, 3)).astype(np.uint8)
for name, made in (('Blur', cv2.blur(image, (7, 7))), ('MedianBlur', cv2.medianBlur(image, 7))):
    transform = getattr(albumentations, name)(blur_limit=(7, 7), p=1.)
    found = transform(image=image)['image']
    print(albumentations.__version__, name, f'has 7 pixels: {np.array_equal(found, made)}')
END
for version in 1.3.1 1.4.0 1.4.4 1.4.6; do
    venv/bin/pip install --quiet --no-compile --no-deps --target "$version" "albumentations==$version"
    NO_ALBUMENTATIONS_UPDATE=1 PYTHONPATH="$version" venv/bin/python look.py
done | tee seen
diff seen - <<'END'
1.3.1 Blur has 7 pixels: True
1.3.1 MedianBlur has 7 pixels: True
1.4.0 Blur has 7 pixels: False
1.4.0 MedianBlur has 7 pixels: False
1.4.4 Blur has 7 pixels: False
1.4.4 MedianBlur has 7 pixels: False
1.4.6 Blur has 7 pixels: True
1.4.6 MedianBlur has 7 pixels: True
END
