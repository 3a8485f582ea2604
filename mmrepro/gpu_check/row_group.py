"""A group of rows of the check: what runs them, and the columns of their table."""
from __future__ import annotations

from typing import Any, Callable, NamedTuple

from .. import ops
from ..ops.provider import MARK

# The result of a row, as it is in gpu_check.json.
Row = dict[str, Any]


class Settings(NamedTuple):
    """How the rows of a check run."""

    device: str  # 'cuda' or 'cpu'
    quick: bool  # small inputs, few repetitions
    iterations: int  # of a detector
    size: int  # pixels of an image


class RowGroup(NamedTuple):
    """Rows of one kind.

    ``rows`` gets the settings, and a function that says whether there is time for another row. It
    returns by name the functions that run a row.
    """

    title: str  # of the table
    subject: str  # heading of the names
    columns: tuple[tuple[str, Callable[[Row], str]], ...]  # heading and text of further columns
    rows: Callable[[Settings, Callable[[], bool]], dict[str, Callable[[], Row]]]
    first: tuple[str, ...] = ()  # names of rows that run before all others, in this order


def has_compiled_kernels() -> bool:
    """Whether the installed mmcv is a compiled one."""
    ops.install()
    import mmcv._ext
    return not hasattr(mmcv._ext, MARK)


def cell(key: str, form: str = '') -> Callable[[Row], str]:
    """The text of one value of a row; empty if the row does not have it, or it is NaN."""
    def text(row: Row) -> str:
        value = row.get(key)
        return '' if value is None or value != value else format(value, form)
    return text
