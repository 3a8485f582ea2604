"""Does training repeat bit for bit on this device, and what does it cost?

See docs/how-to/check-a-gpu.md.

    python tools/gpu_check.py --out DIR [--device cuda|cpu] [--quick] [--only REGEX] [--seconds N]
"""
import os
import sys

# a checkout works without being installed, and is preferred to an installed mmrepro
ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
if os.path.isfile(os.path.join(ROOT, 'mmrepro', '__init__.py')):
    sys.path.insert(0, ROOT)

from mmrepro.cli.gpu_check import main  # noqa: E402

if __name__ == '__main__':
    sys.exit(main())
