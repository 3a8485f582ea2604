"""What the scripts in this folder share: `python tools/VERB.py ...` is `mmrepro VERB ...`."""
import os
import sys

# a checkout works without being installed, and is preferred to an installed mmrepro
ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
if os.path.isfile(os.path.join(ROOT, 'mmrepro', '__init__.py')):
    sys.path.insert(0, ROOT)

from mmrepro import cli  # noqa: E402


def run(verb, main=None):
    """Run a verb, or with `main` a command of that name, and end the process."""
    sys.exit(cli.run(verb, main=main))
