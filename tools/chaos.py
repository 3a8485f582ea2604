"""Kill a training run at random moments, resume it, compare it with the uninterrupted run.

    python tools/chaos.py CONFIG [--kills 100] [--seed 0] [--ranks 2]
"""
from _door import run

if __name__ == '__main__':
    run(__file__)
