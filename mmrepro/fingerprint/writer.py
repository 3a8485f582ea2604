"""Append records to a fingerprint file so that a killed process leaves all but its last line."""
from __future__ import annotations

import json
import os
from typing import Any

from ..util.text import encoded


class Writer:
    """Writes one JSON object per line, unbuffered.

    A torn line of an earlier process is ended first, so that only that line is damaged.
    """

    def __init__(self, path: str) -> None:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        self._file = open(path, 'ab+', buffering=0)
        if self._file.tell():
            self._file.seek(-1, os.SEEK_END)
            if self._file.read(1) != b'\n':
                self._file.write(b'\n')

    def write(self, record: dict[str, Any]) -> None:
        line = json.dumps(record, separators=(',', ':'), ensure_ascii=False, allow_nan=False)
        self._file.write(encoded(line) + b'\n')

    def close(self) -> None:
        self._file.close()
