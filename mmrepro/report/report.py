"""A report, the outcome of a verb: its tables and plots, and the ways to show it.

A terminal gets tables whose names are never cut, and verdicts in color; a web page is one HTML file
that holds plots and style, so that nothing is loaded; a program gets plain data.
"""
from __future__ import annotations

import base64
import io
import json
import math
import os
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from html import escape
from itertools import zip_longest
from pathlib import Path
from typing import Any, NamedTuple

from ..errors import DIFFERENT, DONE
from ..version import __version__


@dataclass
class Table:
    """Rows of text under a header; without a header, names and values."""
    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    title: str = ''
    styles: Sequence[str] = ()  # for each row, a key of STYLES
    text: str = ''  # a paragraph before the rows
    shown: int | None = None  # number of rows on a terminal; None: all of them
    rest: str = ''  # on a terminal, what follows the number of the rows that are not shown
    code: Sequence[int] = ()  # columns that a web page sets in a fixed pitch


class Figure(NamedTuple):
    """A plot that is drawn when it is needed."""
    title: str
    draw: Callable[[], bytes | None]  # returns a PNG; None: there is nothing to draw


def plain(value: Any) -> Any:
    """Return dicts, lists and scalars for named tuples, tuples and numbers that JSON lacks.

    >>> plain({'a': (1, float('nan'))})
    {'a': [1, None]}
    """
    if hasattr(value, '_asdict'):
        value = value._asdict()
    if isinstance(value, Mapping):
        return {name: plain(part) for name, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


@dataclass
class Report:
    """The outcome of a verb. ``print(report)`` shows the text, a notebook the web page.

    Attributes:
        title: what was examined.
        verdict: the answer, one or more lines.
        exit_code: 0, or what :mod:`mmrepro.errors` says.
        tables: the evidence.
        notes: what restricts the verdict.
        advice: what to do next.
        figures: name -> plot.
        data: the outcome in plain data, for programs.
    """
    title: str
    verdict: str
    exit_code: int = DONE
    tables: list[Table] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    advice: list[str] = field(default_factory=list)
    figures: Mapping[str, Figure] = field(default_factory=dict)
    data: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.data = plain(self.data)

    @cached_property
    def images(self) -> dict[str, bytes]:
        """The figures that have something to show, as PNG."""
        drawn = {name: figure.draw() for name, figure in self.figures.items()}
        return {name: image for name, image in drawn.items() if image is not None}

    def json(self) -> str:
        """Return the outcome as JSON; a key of :attr:`data` has precedence."""
        return json.dumps({**dict(exit_code=self.exit_code, verdict=self.verdict,
                                  notes=self.notes), **self.data}, indent=1, default=str)

    def html(self) -> str:
        """Return one HTML document with everything in it."""
        return html_page(self.title, self.verdict, self.exit_code == DONE, [
            *((table.title, html_table(table)) for table in self.tables),
            *((figure.title, html_image(figure.title, self.images[name]))
              for name, figure in self.figures.items() if name in self.images),
            ('Notes', html_items(self.notes)),
            ('What next', html_items(self.advice))])

    def show(self, everything: bool = False, file: Any = None) -> None:
        """Print to the standard output, or to ``file``; ``everything``: all rows of tables."""
        out = console(file)
        if self.title:
            print_line(out, self.title, 'strong')
        for table in self.tables:
            print_table(out, table, everything)
        for note in self.notes:
            print_line(out, f'note: {note}', 'warn')
        if self.verdict:
            style = {DONE: 'good', DIFFERENT: 'bad'}.get(self.exit_code, 'warn')
            print_line(out, self.verdict, style)
        for item in self.advice:
            print_line(out, f'  {item}')

    def write(self, folder: str, name: str) -> dict[str, str]:
        """Write ``NAME.html``, ``NAME.json`` and the figures; returns the paths by name.

        Raises:
            MissingPackageError: matplotlib is not installed; nothing is written then.
        """
        files = {**{f'{key}.png': image for key, image in self.images.items()},
                 f'{name}.html': self.html().encode(), f'{name}.json': self.json().encode()}
        os.makedirs(folder, exist_ok=True)
        for file_name, content in files.items():
            with open(os.path.join(folder, file_name), 'wb') as file:
                file.write(content)
        return {file_name: os.path.join(folder, file_name) for file_name in files}

    def __str__(self) -> str:
        text = io.StringIO()
        self.show(file=text)
        return text.getvalue()

    _repr_html_ = html


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
