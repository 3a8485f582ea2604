"""A report, the outcome of a verb; a terminal, a web page and a program show it."""
from __future__ import annotations

import io
import json
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

from ..errors import DIFFERENT, DONE
from . import renderers
from .table import Table


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
        return renderers.html_page(self.title, self.verdict, self.exit_code == DONE, [
            *((table.title, renderers.html_table(table)) for table in self.tables),
            *((figure.title, renderers.html_image(figure.title, self.images[name]))
              for name, figure in self.figures.items() if name in self.images),
            ('Notes', renderers.html_items(self.notes)),
            ('What next', renderers.html_items(self.advice))])

    def show(self, everything: bool = False, file: Any = None) -> None:
        """Print to the standard output, or to ``file``; ``everything``: all rows of tables."""
        out = renderers.console(file)
        if self.title:
            renderers.print_line(out, self.title, 'strong')
        for table in self.tables:
            renderers.print_table(out, table, everything)
        for note in self.notes:
            renderers.print_line(out, f'note: {note}', 'warn')
        if self.verdict:
            style = {DONE: 'good', DIFFERENT: 'bad'}.get(self.exit_code, 'warn')
            renderers.print_line(out, self.verdict, style)
        for item in self.advice:
            renderers.print_line(out, f'  {item}')

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
