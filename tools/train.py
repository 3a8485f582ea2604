"""Train a detector: MMDetection's tools/train.py, with --seed, --deterministic, --diff-rank-seed.

    python tools/train.py CONFIG [--seed 42] [--deterministic]
"""
import os
import sys

# a checkout works without being installed, and is preferred to an installed mmrepro
ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
if os.path.isfile(os.path.join(ROOT, 'mmrepro', '__init__.py')):
    sys.path.insert(0, ROOT)

from mmrepro.runs.start import train  # noqa: E402

if __name__ == '__main__':
    sys.exit(train())
