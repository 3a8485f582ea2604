"""Results on the terminal: tables whose names are never cut, verdicts in colour."""
from __future__ import annotations

import os
import re
import sys
from typing import Any

PIPED = 240  # characters of a line where no terminal says how many; COLUMNS does if it is set

# what stands out -> how; without a terminal, or with NO_COLOR set, the text is printed as it is
STYLES = (
    (re.compile(r'\bSAME BITS\b|(?<=  )equal$', re.MULTILINE), 'bold green'),
    (re.compile(r'\bDIFFERENT( BITS)?\b|\bNOTHING WAS COMPARED\b|^ *changes bits:', re.MULTILINE),
     'bold red'),
    (re.compile(r'^ *may change bits:', re.MULTILINE), 'yellow'),
    (re.compile(r'^  (?:where|what|shapes|differs|calls|only in|cause|evidence|fix)(?= )',
                re.MULTILINE), 'bold'),
    (re.compile(r'(?<=^  cause     ).*$', re.MULTILINE), 'yellow'),
    (re.compile(r'(?<=^  fix       ).*$', re.MULTILINE), 'green'),
)


def console() -> Any:
    """A ``rich.console.Console`` on the standard output."""
    from rich.console import Console
    known = sys.stdout.isatty() or os.environ.get('COLUMNS')
    return Console(highlight=False, width=None if known else PIPED)


def table(*headers: str) -> Any:
    """A ``rich.table.Table`` without lines. A row that is too long goes on below itself."""
    from rich.table import Column, Table
    return Table(*(Column(header, overflow='fold') for header in headers), box=None)


def show(text: str) -> None:
    """Print ``text`` with its verdicts in colour; lines are not wrapped."""
    from rich.text import Text
    painted = Text(text)
    for pattern, style in STYLES:
        painted.highlight_regex(pattern, style)
    console().print(painted, soft_wrap=True)
