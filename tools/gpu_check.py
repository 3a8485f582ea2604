"""Does training repeat bit for bit on this device, and what does it cost?

Detectors and single operators, in a checkout of mmrepro. See docs/evidence/gpu.md.
"""
from _door import run

from dev.gpu_check.command import COMMAND, main

if __name__ == '__main__':
    run(COMMAND, main)
