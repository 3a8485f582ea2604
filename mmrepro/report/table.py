"""A table of a report, apart from how a terminal, a web page or a program shows it."""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass
class Table:
    """Rows of text under a header; without a header, names and values."""
    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    title: str = ''
    styles: Sequence[str] = ()  # for each row, a key of mmrepro.report.renderers.STYLES
    text: str = ''  # a paragraph before the rows
    shown: int | None = None  # number of rows on a terminal; None: all of them
    rest: str = ''  # on a terminal, what follows the number of the rows that are not shown
    code: Sequence[int] = ()  # columns that a web page sets in a fixed pitch
