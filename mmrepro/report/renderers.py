"""Reports on a terminal (tables whose names are never cut, verdicts in color), and as one HTML file
each, in which plots and style are: nothing is loaded.
"""
from __future__ import annotations

import base64
import os
import re
import sys
from collections.abc import Iterable
from functools import partial
from html import escape
from itertools import zip_longest
from pathlib import Path
from typing import Any

from ..version import __version__
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


_CSS = Path(__file__).with_name('html.css').read_text('utf-8')


def html_page(title: str, verdict: str, same: bool, sections: Iterable[tuple[str, str]]) -> str:
    """Return a whole HTML document, without the sections (title, HTML) that hold nothing."""
    kind = 'same' if same else 'other'
    body = [f'<h1>{escape(title)}</h1>',
            *(f'<div class="verdict {kind}">{escape(line)}</div>' for line in verdict.splitlines())]
    for name, content in sections:
        if content:
            heading = f'<h2>{escape(name)}</h2>' if name else ''
            body.append(f'<section>{heading}{content}</section>')
    return ('<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
            '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
            f'<title>{escape(title)}</title>\n<style>{_CSS}</style>\n</head>\n<body>\n<main>\n'
            + '\n'.join(body)
            + f'\n<p class="soft">mmrepro {escape(__version__)}</p>\n</main>\n</body>\n</html>\n')


def html_table(content: Table) -> str:
    text = f'<p class="soft">{escape(content.text)}</p>' if content.text else ''
    if not content.rows:
        return text
    names = ''.join(f'<th>{escape(name)}</th>' for name in content.header)
    head = f'<thead><tr>{names}</tr></thead>' if names else ''
    rows = []
    for row, style in zip_longest(content.rows, content.styles, fillvalue=''):
        cells = ''.join(f'<td{" class=code" if column in content.code else ""}>{escape(cell)}</td>'
                        for column, cell in enumerate(row))
        rows.append(f'<tr{" class=" + style if style else ""}>{cells}</tr>')
    return f'{text}<table>{head}<tbody>{"".join(rows)}</tbody></table>'


def html_items(texts: Iterable[str]) -> str:
    lines = ''.join(f'<li>{escape(text)}</li>' for text in texts)
    return f'<ul>{lines}</ul>' if lines else ''


def html_image(title: str, data: bytes) -> str:
    svg = getattr(data, 'svg', None)  # sharp at any width
    kind, content = ('png', data) if svg is None else ('svg+xml', svg)
    text = base64.b64encode(content).decode()
    return f'<img alt="{escape(title)}" src="data:image/{kind};base64,{text}">'
