"""Evaluate a checkpoint: MMDetection's tools/test.py, with --seed and --deterministic."""
from _door import run

if __name__ == '__main__':
    run('test')
