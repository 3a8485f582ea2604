"""A table of a report, apart from how a terminal, a web page or a program shows it."""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass
class Table:
    """Rows of text under a header; without a header, names and values.

    Attributes:
        styles: a key of :data:`mmrepro.report.terminal.STYLES` or '' for each row; empty: no
            styles.
        text: a paragraph before the rows.
        shown: number of rows on a terminal; None: all of them.
        rest: on a terminal, what follows the number of the rows that are not shown.
        code: columns that a web page sets in a fixed pitch.
    """
    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    title: str = ''
    styles: Sequence[str] = ()
    text: str = ''
    shown: int | None = None
    rest: str = ''
    code: Sequence[int] = ()
