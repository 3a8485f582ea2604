"""A report: its content, and how a terminal, a web page and a program show it."""
from __future__ import annotations

import os

from .html import page
from .model import Content
from .terminal import text_of


class Report(Content):
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

    def html(self) -> str:
        """One HTML document with everything in it."""
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
        return text_of(self)

    def _repr_html_(self) -> str:
        return self.html()
