"""The content of a report, apart from how a terminal, a web page or a program shows it."""
from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

from ..exit_codes import DONE


@dataclass
class Table:
    """Rows of text under a header; without a header, names and values.

    Attributes:
        styles: a key of :data:`mmrepro.report.terminal.STYLES` or '' for each row; empty: no
            styles.
        text: a paragraph before the rows.
        shown: number of rows on a terminal; None: all of them.
        rest: on a terminal, the line that stands for the rows that are not shown.
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

    def styled_rows(self) -> list[tuple[Sequence[str], str]]:
        """Rows with their styles."""
        return list(zip(self.rows, self.styles or [''] * len(self.rows)))


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
class Content:
    """The outcome of a verb, which renderers show; see :class:`mmrepro.report.report.Report`."""
    title: str
    verdict: str
    exit_code: int = DONE
    tables: list[Table] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    advice: list[str] = field(default_factory=list)
    figures: Mapping[str, Figure] = field(default_factory=dict)
    data: dict[str, Any] = field(default_factory=dict)
    scalars: list[tuple[str, float, int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.data = plain(self.data)

    @cached_property
    def images(self) -> dict[str, bytes]:
        """The figures that have something to show, as PNG."""
        drawn = {name: one.draw() for name, one in self.figures.items()}
        return {name: image for name, image in drawn.items() if image is not None}

    def as_dict(self) -> dict[str, Any]:
        """Plain data; what :attr:`data` says has precedence."""
        return {**dict(exit_code=self.exit_code, verdict=self.verdict, notes=self.notes),
                **self.data}

    def json(self) -> str:
        return json.dumps(self.as_dict(), indent=1, default=str)
