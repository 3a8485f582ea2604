"""The report of a verb, apart from how a terminal, a web page or a program shows it."""
from __future__ import annotations

import json
import os
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


@dataclass
class Report:
    """The outcome of a verb.

    ``print(report)`` shows the text, a notebook the web page.

    Attributes:
        title: what was examined.
        verdict: the answer, one or more lines.
        exit_code: 0, or what :mod:`mmrepro.exit_codes` says.
        tables: the evidence.
        notes: what restricts the verdict.
        advice: what to do next.
        figures: name -> plot.
        data: the outcome in plain data, for programs.
        scalars: ``(tag, value, step)`` for TensorBoard and the like.
    """
    title: str
    verdict: str
    exit_code: int = DONE
    tables: list[Table] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    advice: list[str] = field(default_factory=list)
    figures: Mapping[str, Figure] = field(default_factory=dict)
    data: dict[str, Any] = field(default_factory=dict)
    scalars: list[tuple[str, float, int]] = field(default_factory=list)

    @cached_property
    def images(self) -> dict[str, bytes]:
        """The figures that have something to show, as PNG.

        Raises:
            MissingPackageError: matplotlib is not installed.
        """
        drawn = {name: one.draw() for name, one in self.figures.items()}
        return {name: image for name, image in drawn.items() if image is not None}

    def as_dict(self) -> dict[str, Any]:
        """Plain data; what :attr:`data` says has precedence."""
        return {**dict(exit_code=self.exit_code, verdict=self.verdict, notes=self.notes),
                **self.data}

    def json(self) -> str:
        return json.dumps(self.as_dict(), indent=1, default=str)

    def html(self) -> str:
        """One HTML document with everything in it."""
        from .html import page
        return page(self)

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
        from .terminal import text_of
        return text_of(self)

    def _repr_html_(self) -> str:
        return self.html()
