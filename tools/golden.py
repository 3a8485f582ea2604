"""Keep the bits of a short run in the repository, and check them."""
from _door import run

if __name__ == '__main__':
    run(__file__)
