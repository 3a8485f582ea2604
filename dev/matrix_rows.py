"""A file of rows that an interrupted matrix continues, and the comparison of two records."""
from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

__all__ = ['RowFile', 'lines_differ']


class RowFile:
    """Rows in a JSON file; an existing file is continued.

    Args:
        keys: Of a row, which tell rows apart; they are printed.
        header: Written into a new file.
    """

    def __init__(self, path: str, keys: Sequence[str], **header: Any) -> None:
        self.path, self.keys = Path(path), tuple(keys)
        self._report = json.loads(self.path.read_text()) if self.path.exists() else dict(
            header, rows=[])

    @property
    def rows(self) -> list[dict[str, Any]]:
        return self._report['rows']

    def of(self, row: dict[str, Any]) -> tuple:
        return tuple(row[key] for key in self.keys)

    def missing(self, table: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return the rows of ``table`` that are not in the file."""
        stands = {self.of(row) for row in self.rows}
        return [row for row in table if self.of(row) not in stands]

    def add(self, row: dict[str, Any]) -> None:
        """Append a row with its outcome, 'difference', and write the file."""
        self.rows.append(row)
        partial = self.path.with_suffix('.partial')
        partial.write_text(self._text())
        partial.replace(self.path)
        print(*self.of(row), row['difference'] or row.get('cannot') or 'equal', flush=True)

    def _text(self) -> str:
        """Return the text of the file, a line per row, so that a diff shows which rows are new."""
        header = json.dumps({key: value for key, value in self._report.items() if key != 'rows'})
        rows = ',\n'.join(json.dumps(row) for row in self.rows)
        return f'{header[:-1]}{", " if len(header) > 2 else ""}"rows": [\n{rows}\n]}}\n'


def lines_differ(rank: int, expected: Sequence[dict[str, Any]], found: Sequence[dict[str, Any]]
                 ) -> str:
    """Return where two records of a rank, a dict per iteration, first differ; '' if equal."""
    if len(expected) != len(found):
        return f'rank {rank}: {len(found)} lines instead of {len(expected)}'
    for one, other in zip(expected, found):
        for key in one:
            if one[key] != other.get(key):
                return f'rank {rank}, iteration {one["iteration"]}: {key}'
    return ''
