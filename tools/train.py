"""Train a detector: MMDetection's tools/train.py, with arguments for reproducibility."""
from _door import run

if __name__ == '__main__':
    run('train')
