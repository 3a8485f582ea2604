"""List mmcv's operators: what provides each, and whether it gives the same bits."""
from _door import run

if __name__ == '__main__':
    run(__file__)
