"""Look for what would make two runs of a config differ, without running it."""
from _door import run

if __name__ == '__main__':
    run(__file__)
