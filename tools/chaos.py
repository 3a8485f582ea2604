"""Kill a training run at random moments, resume it, compare it with the uninterrupted run."""
from _door import run

if __name__ == '__main__':
    run(__file__)
