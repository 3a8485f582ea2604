"""Train several seeds, and say how far a metric can be trusted."""
from _door import run

if __name__ == '__main__':
    run(__file__)
