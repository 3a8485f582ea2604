"""Reports as one HTML file each: plots and style are in the file, nothing is loaded."""
from __future__ import annotations

import base64
from collections.abc import Iterable
from html import escape

from ..exit_codes import DONE
from ..version import __version__
from .model import Content, Table

STYLE = """
:root { color-scheme: light dark; --back: #f5f6f8; --card: #fff; --ink: #22272e; --soft: #5d6672;
  --line: #dfe3e8; --same: #00674c; --same-back: #e0f4ec; --other: #a33f00; --other-back: #fdeadd;
 }
@media (prefers-color-scheme: dark) { :root { --back: #14171b; --card: #1d2126; --ink: #e6e9ed;
  --soft: #98a2ae; --line: #333941; --same: #5fd3ac; --same-back: #12352a; --other: #ffb184;
  --other-back: #43240f; } }
* { box-sizing: border-box }
body { margin: 0; background: var(--back); color: var(--ink); line-height: 1.5;
  font: 15px/1.5 system-ui, -apple-system, 'Segoe UI', 'DejaVu Sans', sans-serif }
main { max-width: 1080px; margin: 0 auto; padding: 28px 20px 60px }
h1 { font-size: 24px; margin: 0 0 14px } h2 { font-size: 18px; margin: 0 0 12px }
section { background: var(--card); border: 1px solid var(--line); border-radius: 10px;
  padding: 18px 20px; margin: 16px 0; overflow-x: auto }
.verdict { font-weight: 600; font-size: 17px; border-radius: 10px; padding: 14px 20px }
.same { color: var(--same); background: var(--same-back) }
.other { color: var(--other); background: var(--other-back) }
table { border-collapse: collapse; width: 100%; font-size: 14px }
th { text-align: left; color: var(--soft); font-weight: 600; white-space: nowrap }
th, td { padding: 5px 14px 5px 0; border-bottom: 1px solid var(--line); vertical-align: top }
tr:last-child td { border-bottom: 0 }
td.code { min-width: 130px }
td.code, code { font-family: ui-monospace, 'DejaVu Sans Mono', Menlo, Consolas, monospace;
  font-size: 12.5px; overflow-wrap: anywhere }
img { width: 100%; height: auto; background: #fff; border-radius: 6px; display: block }
.soft { color: var(--soft) } ul { margin: 0; padding-left: 20px }
tr.bad td { background: var(--other-back) } tr.soft { color: var(--soft) }
tr.strong { font-weight: 600 }
"""


def page(report: Content) -> str:
    """The report as a whole HTML document."""
    kind = 'same' if report.exit_code == DONE else 'other'
    body = [f'<h1>{escape(report.title)}</h1>',
            *(f'<div class="verdict {kind}">{escape(line)}</div>'
              for line in report.verdict.splitlines()),
            *(_section(table.title, _table(table)) for table in report.tables),
            *(_section(report.figures[name].title, _image(report.figures[name].title, data))
              for name, data in report.images.items()),
            _section('Notes', _list(report.notes)), _section('What next', _list(report.advice))]
    return (f'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
            '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
            f'<title>{escape(report.title)}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n'
            '<main>\n' + '\n'.join(body)
            + f'\n<p class="soft">mmrepro {escape(__version__)}</p>\n</main>\n</body>\n</html>\n')


def _section(title: str, body: str) -> str:
    heading = f'<h2>{escape(title)}</h2>' if title else ''
    return f'<section>{heading}{body}</section>' if body else ''


def _table(table: Table) -> str:
    text = f'<p class="soft">{escape(table.text)}</p>' if table.text else ''
    if not table.rows:
        return text
    names = ''.join(f'<th>{escape(name)}</th>' for name in table.header)
    head = f'<thead><tr>{names}</tr></thead>' if names else ''
    rows = []
    for row, style in table.styled_rows():
        cells = ''.join(f'<td{" class=code" if column in table.code else ""}>{escape(cell)}</td>'
                        for column, cell in enumerate(row))
        rows.append(f'<tr{" class=" + style if style else ""}>{cells}</tr>')
    return f'{text}<table>{head}<tbody>{"".join(rows)}</tbody></table>'


def _list(items: Iterable[str]) -> str:
    lines = ''.join(f'<li>{escape(item)}</li>' for item in items)
    return f'<ul>{lines}</ul>' if lines else ''


def _image(title: str, data: bytes) -> str:
    text = base64.b64encode(data).decode()
    return f'<img alt="{escape(title)}" src="data:image/png;base64,{text}">'
