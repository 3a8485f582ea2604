"""Print results with the words that count in colour, on terminals that have it."""
from __future__ import annotations

import re

__all__ = ['show']

# what stands out -> how; without a terminal, or with NO_COLOR set, the text is printed as it is
WORDS = (
    (re.compile(r'\bSAME BITS\b|(?<=  )equal$', re.MULTILINE), 'bold green'),
    (re.compile(r'\bDIFFERENT( BITS)?\b|\bNOTHING WAS COMPARED\b|^ *changes bits:', re.MULTILINE),
     'bold red'),
    (re.compile(r'^ *may change bits:', re.MULTILINE), 'yellow'),
    (re.compile(r'^  (?:where|what|shapes|differs|calls|one side|cause|evidence|cure)(?= )',
                re.MULTILINE), 'bold'),
    (re.compile(r'(?<=^  cause     ).*$', re.MULTILINE), 'yellow'),
    (re.compile(r'(?<=^  cure      ).*$', re.MULTILINE), 'green'),
)


def show(text: str) -> None:
    """Print ``text`` to the standard output; lines are not wrapped."""
    from rich.console import Console
    from rich.text import Text
    painted = Text(text)
    for pattern, style in WORDS:
        painted.highlight_regex(pattern, style)
    Console(highlight=False, soft_wrap=True).print(painted)
