#!/usr/bin/env bash
# albumentations: from 1.4.7 on, a pipeline refuses keys that it does not know (ValueError: Key img_path
# is not in available keys). The transform Albu of MMDetection passes everything that a sample has, such
# as img_path, so no config with Albu runs with these versions. In 2.0.4 they pass through again.
#
# Behaviour seen with albumentations 1.4.6, 1.4.7, 2.0.2, 2.0.4, opencv-python-headless 4.12.0.88,
# numpy 1.26.4
# Exits with an error if that changes.
set -euo pipefail
folder="$(mktemp -d)"
trap 'rm -rf "$folder"' EXIT
cd "$folder"
"${PYTHON:-python3}" -m venv venv
venv/bin/pip install --quiet --no-compile --only-binary :all: numpy==1.26.4 scipy==1.13.1 \
    scikit-image==0.24.0 scikit-learn==1.5.2 pydantic==2.12.5 PyYAML==6.0.3
venv/bin/pip install --quiet --no-compile --no-deps opencv-python-headless==4.12.0.88 \
    albucore==0.0.23 stringzilla==4.6.3 simsimd==6.5.16
cat > look.py <<'END'
import albumentations
import numpy as np

pipeline = albumentations.Compose([albumentations.HorizontalFlip(p=1.)])
try:
    pipeline(image=np.zeros((8, 8, 3), np.uint8), img_path='a.png')
    said = 'passes a path'
except ValueError as error:
    said = str(error)
print(albumentations.__version__, said)
END
for version in 1.4.6 1.4.7 2.0.2 2.0.4; do
    venv/bin/pip install --quiet --no-compile --no-deps --target "$version" "albumentations==$version"
    NO_ALBUMENTATIONS_UPDATE=1 PYTHONPATH="$version" venv/bin/python look.py
done | tee seen
diff seen - <<'END'
1.4.6 passes a path
1.4.7 Key img_path is not in available keys.
2.0.2 Key img_path is not in available keys.
2.0.4 passes a path
END
