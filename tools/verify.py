"""Train in several fresh processes, varying what must not matter, and compare the bits."""
from _door import run

if __name__ == '__main__':
    run(__file__)
