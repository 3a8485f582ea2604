"""Name state in Python attributes that a config loses when it resumes.

    python tools/state.py CONFIG [--at 2] [--iters 4]
"""
from _door import run

if __name__ == '__main__':
    run(__file__)
