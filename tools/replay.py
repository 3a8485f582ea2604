"""Train again from a run's manifest; compare, and stop at the first difference."""
from _door import run

if __name__ == '__main__':
    run(__file__)
