"""Reports on a terminal: tables whose names are never cut, verdicts in color."""
from __future__ import annotations

import os
import re
import sys
from functools import partial
from itertools import zip_longest
from typing import Any

from .table import Table

_BLANKS = re.compile(r'(?: |\x1b\[[0-9;]*m)+$', re.MULTILINE)  # and changes of the style
PIPED = 240  # characters of a line where no terminal says how many; COLUMNS does if it is set
# name of a row's style -> rich's style; without a terminal, or with NO_COLOR set, plain text
STYLES = {'': '', 'good': 'bold green', 'bad': 'bold red', 'warn': 'yellow', 'fix': 'green',
          'strong': 'bold', 'soft': 'dim'}


def console(file: Any = None) -> Any:
    """Return a ``rich.console.Console`` on the standard output, or on ``file``."""
    from rich.console import Console
    # in a notebook, rich would display each line by itself instead of writing it to the file
    make = partial(Console, file=file, highlight=False, force_jupyter=False)
    if (file or sys.stdout).isatty() or os.environ.get('COLUMNS'):
        return make()
    # with a width alone, rich takes 80 where TERM says that the terminal is dumb
    return make(width=PIPED, height=PIPED)


def print_line(out: Any, text: str, style: str = '') -> None:
    """Print a line as it is, in one of :data:`STYLES`; it is not wrapped."""
    from rich.text import Text
    out.print(Text(text, STYLES[style]), soft_wrap=True)


def print_table(out: Any, table: Table, everything: bool) -> None:
    """Print a table and an empty line."""
    from rich.padding import Padding
    from rich.table import Column
    from rich.table import Table as RichTable
    from rich.text import Text
    if table.title:
        print_line(out, table.title, 'strong')
    if table.text:
        print_line(out, table.text)
    rows = list(zip_longest(table.rows, table.styles, fillvalue=''))
    count = len(rows) if everything or table.shown is None else table.shown
    if count:
        columns = table.header or [''] * max(map(len, table.rows))
        shown = RichTable(*(Column(name, overflow='fold') for name in columns), box=None,
                          show_header=bool(table.header), pad_edge=bool(table.header))
        for row, style in rows[:count]:
            shown.add_row(*map(Text, row), style=STYLES[style])
        with out.capture() as printed:
            out.print(shown if table.header else Padding(shown, (0, 0, 0, 2), expand=False))
        # columns are filled with blanks, the last one as well
        out.file.write(_BLANKS.sub(lambda end: end.group().replace(' ', ''), printed.get()))
    if table.rest and count < len(rows):
        print_line(out, f'{len(rows) - count} {table.rest}', 'soft')
    out.print()
