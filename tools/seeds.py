"""Train several seeds, and say how far a metric can be trusted.

    python tools/seeds.py CONFIG --seeds 0..4 [--compare CONFIG_B]
"""
import os
import sys

# a checkout works without being installed, and is preferred to an installed mmrepro
ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
if os.path.isfile(os.path.join(ROOT, 'mmrepro', '__init__.py')):
    sys.path.insert(0, ROOT)

from mmrepro.cli.seeds import main  # noqa: E402

if __name__ == '__main__':
    sys.exit(main())
