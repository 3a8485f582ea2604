"""Train a detector: MMDetection's tools/train.py, with --seed, --deterministic, --diff-rank-seed.

    python tools/train.py CONFIG [--seed 42] [--deterministic]
"""
from _door import run

if __name__ == '__main__':
    run(__file__)
