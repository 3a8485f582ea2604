"""``python -m mmrepro VERB``: the same as the command ``mmrepro``."""
import sys

from .cli import main

if __name__ == '__main__':
    sys.exit(main())
