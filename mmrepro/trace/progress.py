"""One line of progress."""
from __future__ import annotations

from typing import Any

__all__ = ['Line']


class Line:
    """Written over on a terminal; one below the other in a file."""

    def __init__(self, stream: Any) -> None:
        self._stream, self._width = stream, 0

    def say(self, text: str) -> None:
        if self._stream.isatty():
            self._stream.write(f'\r{text:<{self._width}}')
            self._width = len(text)
        else:
            self._stream.write(f'{text}\n')
        self._stream.flush()

    def end(self) -> None:
        if self._width:
            self._stream.write('\n')
            self._width = 0
