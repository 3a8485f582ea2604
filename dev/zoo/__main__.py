"""Sweep over the model zoo: every family builds, trains two steps and infers with mmcv-lite.

    python dev/zoo/__main__.py [dcn mask2former ...] [--out zoo.json]
"""
import os
import sys

# a checkout works without being installed, and is preferred to an installed mmrepro
ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
if os.path.isfile(os.path.join(ROOT, 'mmrepro', '__init__.py')):
    sys.path.insert(0, ROOT)

from dev.zoo.sweep import main  # noqa: E402

if __name__ == '__main__':
    sys.exit(main())
