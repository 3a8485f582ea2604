"""What only developers of mmrepro run; not part of the wheel.

It builds on the trainings of the tests, so ``tests/support`` is found from here on.
"""
import sys
from pathlib import Path

SUPPORT = str(Path(__file__).resolve().parents[1] / 'tests' / 'support')
if SUPPORT not in sys.path:
    sys.path.append(SUPPORT)
