"""Reports as one HTML file each: plots and style are in the file, nothing is loaded."""
from __future__ import annotations

import base64
from collections.abc import Iterable
from html import escape
from itertools import zip_longest
from pathlib import Path

from ..version import __version__
from .table import Table

STYLE = Path(__file__).with_suffix('.css').read_text('utf-8')


def page(title: str, verdict: str, same: bool, sections: Iterable[tuple[str, str]]) -> str:
    """Return a whole HTML document, without the sections (title, HTML) that hold nothing."""
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
    svg = getattr(data, 'svg', None)  # sharp at any width
    kind, content = ('png', data) if svg is None else ('svg+xml', svg)
    text = base64.b64encode(content).decode()
    return f'<img alt="{escape(title)}" src="data:image/{kind};base64,{text}">'
