#!/usr/bin/env bash
# albumentations: values of `label_fields` are columns beside the boxes in one float32 array in 2.0.8,
# so integers come back as floats and, from 2**24 on, as other numbers, even if nothing is transformed.
# Numbers of annotations are such labels where somebody wants to know which boxes are left: COCO numbers
# its crowd regions from 900100000000 on, and several of them become one number. Small numbers, such as
# classes, keep their values. For the same reason a box of exactly `min_area` is kept or dropped by its
# place in the image: its corners are divided by the size of the image, and multiplied again, in float32
# (1.4.6: in float64, where few boxes are lost).
#
# Behaviour seen with albumentations 1.4.6, 2.0.8, opencv-python-headless 4.12.0.88, numpy 1.26.4: the
# numbers of three boxes, and how many of 5418 boxes of 32 x 32 pixels are left with min_area=1024
# Exits with an error if that changes.
set -euo pipefail
folder="$(mktemp -d)"
trap 'rm -rf "$folder"' EXIT
cd "$folder"
"${PYTHON:-python3}" -m venv venv
venv/bin/pip install --quiet --no-compile --only-binary :all: numpy==1.26.4 scipy==1.13.1 \
    scikit-image==0.24.0 scikit-learn==1.5.2 pydantic==2.12.5 PyYAML==6.0.3
venv/bin/pip install --quiet --no-compile --no-deps opencv-python-headless==4.12.0.88 \
    albucore==0.0.24 stringzilla==4.6.3 simsimd==6.5.16
cat > look.py <<'END'
import albumentations
import numpy as np

image = np.zeros((480, 640, 3), np.uint8)


def left(boxes, numbers, **settings):
    pipeline = albumentations.Compose(
        [albumentations.NoOp()],
        bbox_params=albumentations.BboxParams('pascal_voc', label_fields=['numbers'], **settings))
    return pipeline(image=image, bboxes=boxes, numbers=numbers)['numbers']


numbers = [2232119, 900100000139, 900100000203]
found = left([[10, 10, 90, 90]] * 3, numbers)
print(albumentations.__version__, 'numbers:', *found, f'equal: {[int(one) for one in found] == numbers}')
for side in (32, 32.5):
    boxes = [[x, y, x + side, y + side] for x in range(0, 600, 7) for y in range(0, 440, 7)]
    found = left(boxes, list(range(len(boxes))), min_area=1024)
    print(albumentations.__version__, f'boxes with sides of {side}: {len(found)} of {len(boxes)}')
END
for version in 1.4.6 2.0.8; do
    venv/bin/pip install --quiet --no-compile --no-deps --target "$version" "albumentations==$version"
    NO_ALBUMENTATIONS_UPDATE=1 PYTHONPATH="$version" venv/bin/python look.py
done | tee seen
diff seen - <<'END'
1.4.6 numbers: 2232119 900100000139 900100000203 equal: True
1.4.6 boxes with sides of 32: 5332 of 5418
1.4.6 boxes with sides of 32.5: 5418 of 5418
2.0.8 numbers: 2232119.0 900099997696.0 900099997696.0 equal: False
2.0.8 boxes with sides of 32: 3566 of 5418
2.0.8 boxes with sides of 32.5: 5418 of 5418
END
