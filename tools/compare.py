"""Where two runs diverge, and how the difference grows."""
from _door import run

if __name__ == '__main__':
    run(__file__)
