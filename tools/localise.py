"""Name the first thing that differs between two runs.

    python tools/localise.py CONFIG [--b OMP_NUM_THREADS=2]
"""
from _door import run

if __name__ == '__main__':
    run(__file__)
