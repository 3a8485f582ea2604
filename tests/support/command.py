"""The command ``mmrepro`` in this process."""
from __future__ import annotations

from mmrepro import cli


def exit_code(verb, *words, **more):
    """Run a verb; its exit code, that of wrong usage included."""
    try:
        return cli.run(verb, list(map(str, words)), **more)
    except SystemExit as ended:
        return ended.code
