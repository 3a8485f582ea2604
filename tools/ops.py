"""List mmcv's operators: who answers for each, and whether it gives the same bits.

    python tools/ops.py [--json] [--device cuda]
"""
import os
import sys

# a checkout works without being installed, and is preferred to an installed mmrepro
ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
if os.path.isfile(os.path.join(ROOT, 'mmrepro', '__init__.py')):
    sys.path.insert(0, ROOT)

from mmrepro.cli.ops import main  # noqa: E402

if __name__ == '__main__':
    sys.exit(main())
