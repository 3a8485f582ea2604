"""Reports as one HTML file each: plots and style are in the file, nothing is loaded."""
from __future__ import annotations

import base64
from collections.abc import Iterable
from html import escape
from itertools import zip_longest

from ..version import __version__
from .table import Table

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


def page(title: str, verdict: str, same: bool, sections: Iterable[tuple[str, str]]) -> str:
    """Return a whole HTML document.

    Args:
        same: whether the verdict is a good one.
        sections: titles and bodies in HTML; those without a body are left out.
    """
    kind = 'same' if same else 'other'
    body = [f'<h1>{escape(title)}</h1>',
            *(f'<div class="verdict {kind}">{escape(line)}</div>' for line in verdict.splitlines())]
    for name, content in sections:
        if content:
            heading = f'<h2>{escape(name)}</h2>' if name else ''
            body.append(f'<section>{heading}{content}</section>')
    return ('<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
            '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
            f'<title>{escape(title)}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n<main>\n'
            + '\n'.join(body)
            + f'\n<p class="soft">mmrepro {escape(__version__)}</p>\n</main>\n</body>\n</html>\n')


def table(content: Table) -> str:
    text = f'<p class="soft">{escape(content.text)}</p>' if content.text else ''
    if not content.rows:
        return text
    names = ''.join(f'<th>{escape(name)}</th>' for name in content.header)
    head = f'<thead><tr>{names}</tr></thead>' if names else ''
    rows = []
    for row, style in zip_longest(content.rows, content.styles, fillvalue=''):
        cells = ''.join(f'<td{" class=code" if column in content.code else ""}>{escape(cell)}</td>'
                        for column, cell in enumerate(row))
        rows.append(f'<tr{" class=" + style if style else ""}>{cells}</tr>')
    return f'{text}<table>{head}<tbody>{"".join(rows)}</tbody></table>'


def items(texts: Iterable[str]) -> str:
    lines = ''.join(f'<li>{escape(text)}</li>' for text in texts)
    return f'<ul>{lines}</ul>' if lines else ''


def image(title: str, data: bytes) -> str:
    text = base64.b64encode(data).decode()
    return f'<img alt="{escape(title)}" src="data:image/png;base64,{text}">'
