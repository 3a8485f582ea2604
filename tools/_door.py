"""What the scripts in this folder share: `python tools/VERB.py ...` is `mmrepro VERB ...`."""
import os
import sys

# a checkout works without being installed, and is preferred to an installed mmrepro
ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
if os.path.isfile(os.path.join(ROOT, 'mmrepro', '__init__.py')):
    sys.path.insert(0, ROOT)

from mmrepro import cli  # noqa: E402


def run(verb, *options, **more):
    """Run a verb with `options` before those of the command line, and end the process.

    `more` are further arguments of the verb's function.
    """
    sys.exit(cli.run(verb, [*options, *sys.argv[1:]], **more))
