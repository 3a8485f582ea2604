"""Train several seeds, and say how far a metric can be trusted.

    python tools/seeds.py CONFIG --seeds 0..4 [--compare CONFIG_B]
"""
from _door import run

if __name__ == '__main__':
    run(__file__)
