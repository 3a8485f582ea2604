"""What the scripts in this folder share: `python tools/VERB.py ...` is `mmrepro VERB ...`."""
import os
import sys

# a checkout works without being installed, and is preferred to an installed mmrepro
ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
if os.path.isfile(os.path.join(ROOT, 'mmrepro', '__init__.py')):
    sys.path.insert(0, ROOT)

from mmrepro import cli  # noqa: E402


def run(script, *more):
    """Run the verb of a script's name; `more` are further arguments of its function."""
    verb = os.path.splitext(os.path.basename(script))[0]
    sys.exit(cli.run(verb, sys.argv[1:], *more))
