#!/usr/bin/env bash
# albumentations: version 2.0 has other names for arguments (quality_range for quality_lower and
# quality_upper, std_range for var_limit). The old names are no errors: a transform warns and is built
# with its defaults. A config that asks for JPEG artifacts of quality 5, or for Gaussian noise of
# variance 1000 to 1001, trains with quality 99 or 100, or with noise of another strength, from then on.
#
# Behaviour seen with albumentations 1.4.6, 2.0.8, opencv-python-headless 4.12.0.88, numpy 1.26.4:
# printed is the whether the mean change of a gray ramp is that of the strength asked for
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
import warnings

import albumentations
import numpy as np

image = np.linspace(64, 192, 64).astype(np.uint8)[None, :, None].repeat(64, 0).repeat(3, 2)
for name, settings, asked in (
        ('ImageCompression', dict(quality_lower=5, quality_upper=6), (2, 20)),
        ('GaussNoise', dict(var_limit=(1000., 1001.)), (20, 30))):
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter('always')
        transform = albumentations.Compose([getattr(albumentations, name)(p=1., **settings)])
    said = any('are not valid' in str(one.message) for one in seen)
    change = np.abs(transform(image=image)['image'].astype(int) - image).mean()
    print(albumentations.__version__, name, f'warns: {said}; as asked for: {bool(asked[0] < change < asked[1])}')
END
for version in 1.4.6 2.0.8; do
    venv/bin/pip install --quiet --no-compile --no-deps --target "$version" "albumentations==$version"
    NO_ALBUMENTATIONS_UPDATE=1 PYTHONPATH="$version" venv/bin/python look.py
done | tee seen
diff seen - <<'END'
1.4.6 ImageCompression warns: False; as asked for: True
1.4.6 GaussNoise warns: False; as asked for: True
2.0.8 ImageCompression warns: True; as asked for: False
2.0.8 GaussNoise warns: True; as asked for: False
END
