"""Name the first thing that differs between two runs."""
from _door import run

if __name__ == '__main__':
    run(__file__)
