"""Where two runs diverge, and how the difference grows.

    python tools/compare.py RUN_A RUN_B [--out DIR]
"""
from _door import run

if __name__ == '__main__':
    run(__file__)
