"""Tables for the terminal, and for what they are piped into: names are wrapped, never cut."""
from __future__ import annotations

import os
import sys
from typing import Any

__all__ = ['console', 'table']

PIPED = 240  # characters of a line where no terminal says how many; COLUMNS does if it is set


def console() -> Any:
    """A ``rich.console.Console`` on the standard output."""
    from rich.console import Console
    known = sys.stdout.isatty() or os.environ.get('COLUMNS')
    return Console(highlight=False, width=None if known else PIPED)


def table(*headers: str) -> Any:
    """A ``rich.table.Table`` without lines. A row that is too long goes on below itself."""
    from rich.table import Column, Table
    return Table(*(Column(header, overflow='fold') for header in headers), box=None)
