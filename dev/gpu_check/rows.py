"""A group of rows of the check: what runs them, and the columns of their table."""
from __future__ import annotations

from typing import Any, Callable, NamedTuple

# The result of a row, as it is in gpu_check.json.
Row = dict[str, Any]


class Settings(NamedTuple):
    """How the rows of a check run."""

    device: str  # 'cuda' or 'cpu'
    quick: bool  # small inputs, few repetitions
    iterations: int  # of a detector
    size: int  # pixels of an image


class RowGroup(NamedTuple):
    """Rows of one kind, and the columns of their table.

    ``rows`` receives the settings, and a function that says whether there is time for another row.
    It returns by name the functions that run a row.
    """

    title: str  # of the table
    subject: str  # heading of the names
    columns: tuple[tuple[str, Callable[[Row], str]], ...]  # heading and text of further columns
    rows: Callable[[Settings, Callable[[], bool]], dict[str, Callable[[], Row]]]
    first: tuple[str, ...] = ()  # names of rows that run before all others, in this order


def cell(key: str, form: str = '') -> Callable[[Row], str]:
    """Return a function that formats value ``key`` of a row; '' if it is missing or NaN."""
    def text(row: Row) -> str:
        value = row.get(key)
        return '' if value is None or value != value else format(value, form)
    return text
