"""Reports on a terminal: tables whose names are never cut, verdicts in color."""
from __future__ import annotations

import io
import os
import sys
from typing import Any

from ..exit_codes import DIFFERENT, DONE
from .model import Content, Table

PIPED = 240  # characters of a line where no terminal says how many; COLUMNS does if it is set
# name of a row's style -> rich's style; without a terminal, or with NO_COLOR set, plain text
STYLES = {'': '', 'good': 'bold green', 'bad': 'bold red', 'warn': 'yellow', 'fix': 'green',
          'strong': 'bold', 'soft': 'dim'}
_VERDICTS = {DONE: 'good', DIFFERENT: 'bad'}


def console(file: Any = None) -> Any:
    """A ``rich.console.Console`` on the standard output, or on ``file``."""
    from rich.console import Console
    if (file or sys.stdout).isatty() or os.environ.get('COLUMNS'):
        return Console(file=file, highlight=False)
    # with a width alone, rich takes 80 where TERM says that the terminal is dumb
    return Console(file=file, highlight=False, width=PIPED, height=PIPED)


def say(text: str, style: str = '') -> None:
    """Print a line as it is, in one of :data:`STYLES`; it is not wrapped."""
    from rich.text import Text
    console().print(Text(text, STYLES[style]), soft_wrap=True)


def show(report: Content, everything: bool = False, file: Any = None) -> None:
    """Print a report: title, tables, notes, verdict, advice.

    Args:
        everything: print all rows of tables.
    """
    from rich.text import Text
    out = console(file)
    if report.title:
        out.print(Text(report.title, STYLES['strong']), soft_wrap=True)
    for table in report.tables:
        _print_table(table, out, everything)
        out.print()
    for note in report.notes:
        out.print(Text(f'note: {note}', STYLES['warn']), soft_wrap=True)
    if report.verdict:
        style = STYLES[_VERDICTS.get(report.exit_code, 'warn')]
        out.print(Text(report.verdict, style), soft_wrap=True)
    for item in report.advice:
        out.print(Text(f'  {item}'), soft_wrap=True)


def text_of(report: Content) -> str:
    """The report without colors."""
    file = io.StringIO()
    show(report, file=file)
    return file.getvalue()


def _print_table(table: Table, out: Any, everything: bool) -> None:
    from rich.padding import Padding
    from rich.table import Column
    from rich.table import Table as RichTable
    from rich.text import Text
    if table.title:
        out.print(Text(table.title, STYLES['strong']), soft_wrap=True)
    if table.text:
        out.print(Text(table.text), soft_wrap=True)
    rows = table.styled_rows()
    count = len(rows) if everything or table.shown is None else table.shown
    if count:
        columns = table.header or [''] * max(map(len, table.rows))
        shown = RichTable(*(Column(name, overflow='fold') for name in columns), box=None,
                          show_header=bool(table.header), pad_edge=bool(table.header))
        for row, style in rows[:count]:
            shown.add_row(*map(Text, row), style=STYLES[style])
        out.print(shown if table.header else Padding(shown, (0, 0, 0, 2), expand=False))
    if table.rest and count < len(rows):
        out.print(Text(table.rest, STYLES['soft']), soft_wrap=True)
