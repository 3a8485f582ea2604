"""Evaluate a checkpoint: MMDetection's tools/test.py, with --seed and --deterministic.

    python tools/test.py CONFIG CHECKPOINT [--seed 42] [--deterministic]
"""
import os
import sys

# a checkout works without being installed, and is preferred to an installed mmrepro
ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
if os.path.isfile(os.path.join(ROOT, 'mmrepro', '__init__.py')):
    sys.path.insert(0, ROOT)

from mmrepro.runs.start import test  # noqa: E402

if __name__ == '__main__':
    sys.exit(test())
