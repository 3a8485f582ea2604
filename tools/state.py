"""Name state in Python attributes that a config loses when it resumes.

    python tools/state.py CONFIG [--at 2] [--iters 4]
"""
import os
import sys

# a checkout works without being installed, and is preferred to an installed mmrepro
ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
if os.path.isfile(os.path.join(ROOT, 'mmrepro', '__init__.py')):
    sys.path.insert(0, ROOT)

from mmrepro.verify.state_probe import main  # noqa: E402

if __name__ == '__main__':
    sys.exit(main())
