"""Train in several fresh processes, varying what must not matter, and compare the bits.

    python tools/verify.py CONFIG [--demo-data] [--vary workers,resume]
"""
import os
import sys

# a checkout works without being installed, and is preferred to an installed mmrepro
ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
if os.path.isfile(os.path.join(ROOT, 'mmrepro', '__init__.py')):
    sys.path.insert(0, ROOT)

from mmrepro.verify.variations import main  # noqa: E402

if __name__ == '__main__':
    sys.exit(main())
