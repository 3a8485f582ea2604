"""Kill a training run at random moments, resume it, compare it with the uninterrupted run.

    python tools/chaos.py CONFIG [--kills 100] [--seed 0] [--ranks 2]
"""
import os
import sys

# a checkout works without being installed, and is preferred to an installed mmrepro
ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
if os.path.isfile(os.path.join(ROOT, 'mmrepro', '__init__.py')):
    sys.path.insert(0, ROOT)

from mmrepro.cli.chaos import main  # noqa: E402

if __name__ == '__main__':
    sys.exit(main())
