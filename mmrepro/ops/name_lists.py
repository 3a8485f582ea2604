"""Names in files, one in a line, under sections that say what holds for them."""
from __future__ import annotations

from configparser import RawConfigParser
from pathlib import Path


def read_names(path: Path) -> dict[str, list[str]]:
    """Return the names by section, in the order of the file."""
    file = RawConfigParser(delimiters=('=', ), allow_no_value=True)
    setattr(file, 'optionxform', str)  # noqa: B010  names are case-sensitive
    file.read(path, 'utf-8')
    return {section: list(file[section]) for section in file.sections()}
