"""HTML reports in one file each: pictures and style are in it, nothing is loaded."""
from __future__ import annotations

import base64
from collections.abc import Iterable, Sequence
from html import escape
from itertools import zip_longest
from typing import Any

from ..text import listed
from ..version import __version__
from .comparison import Comparison, is_known
from .comparison_plots import PLOTS

STYLE = """
:root { color-scheme: light dark; --back: #f5f6f8; --card: #fff; --ink: #22272e; --soft: #5d6672;
  --line: #dfe3e8; --same: #00674c; --same-back: #e0f4ec; --other: #a33f00; --other-back: #fdeadd;
  --a: #0072b2; --b: #c25400; }
@media (prefers-color-scheme: dark) { :root { --back: #14171b; --card: #1d2126; --ink: #e6e9ed;
  --soft: #98a2ae; --line: #333941; --same: #5fd3ac; --same-back: #12352a; --other: #ffb184;
  --other-back: #43240f; --a: #6cb8e6; --b: #f0995c; } }
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
.soft { color: var(--soft) } .a { color: var(--a) } .b { color: var(--b) }
summary { cursor: pointer; color: var(--soft) } ul { margin: 0; padding-left: 20px }
tr.other td { background: var(--other-back) } .tag { font-size: 12.5px; font-weight: 600;
  border-radius: 6px; padding: 1px 8px; white-space: nowrap }
"""


def document(title: str, body: Iterable[str]) -> str:
    """A whole HTML document."""
    return (f'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
            '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
            f'<title>{escape(title)}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n<main>\n'
            + '\n'.join(body)
            + f'\n<p class="soft">mmrepro {escape(__version__)}</p>\n</main>\n</body>\n</html>\n')


def table(head: Sequence[str], rows: Iterable[Sequence[Any]], marked: Sequence[bool] = (),
          code: Sequence[int] = ()) -> str:
    """A table; rows that are ``marked`` stand out, columns in ``code`` are in a fixed pitch."""
    lines = []
    for row, stands_out in zip_longest(rows, marked):
        cells = ''.join(f'<td{" class=code" if column in code else ""}>{escape(str(cell))}</td>'
                        for column, cell in enumerate(row))
        other = ' class="other"' if stands_out else ''
        lines.append(f'<tr{other}>{cells}</tr>')
    names = ''.join(f'<th>{escape(name)}</th>' for name in head)
    return f'<table><thead><tr>{names}</tr></thead><tbody>{"".join(lines)}</tbody></table>'


def section(title: str, body: str) -> str:
    """A part of the document; ``body`` is HTML. Nothing without a body."""
    return f'<section><h2>{escape(title)}</h2>{body}</section>' if body else ''


def listing(items: Iterable[str]) -> str:
    lines = ''.join(f'<li>{escape(item)}</li>' for item in items)
    return f'<ul>{lines}</ul>' if lines else ''


def picture(title: str, data: bytes) -> str:
    """A PNG within the document."""
    text = base64.b64encode(data).decode()
    return section(title, f'<img alt="{escape(title)}" src="data:image/png;base64,{text}">')


def report(found: Comparison, pictures: dict[str, bytes]) -> str:
    """The comparison as one HTML document."""
    runs = [(letter, run.path, run.kind, len(run.iterations),
             f'{run.iterations[0]} to {run.iterations[-1]}' if run.iterations else '-', run.starts)
            for letter, run in (('A', found.a), ('B', found.b))]
    parts = ['<h1>Two runs compared</h1>',
             f'<div class="verdict {"same" if found.equal else "other"}">'
             f'{escape(found.verdict())}</div>',
             section('Runs', table(
                 ('', 'directory', 'read from', 'iterations', 'span', 'starts'), runs, code=(1, )))]
    first = found.first
    if first is not None:
        rows = [(field.field, field.a, field.b, 'same' if field.same else 'differs',
                 listed(field.names, 4)) for field in first.fields]
        module = f'<p>{escape(first.module)}</p>' if first.module else ''
        epoch = '' if first.epoch is None else f', epoch {first.epoch}'
        parts.append(section(
            f'First difference: iteration {first.iteration}{epoch}',
            '<p class="soft">Fields in the order in which an iteration computes them. The first '
            'that differs is the nearest to the cause; those below follow from it. '
            f'{found.differing} of {len(found.common)} common iterations differ.</p>{module}'
            + table(('field', 'A', 'B', '', 'which'), rows,
                    [not field.same for field in first.fields], code=(0, 1, 2, 4))))
    parts.append(section('What the runs were made of', _manifest(found)))
    parts += [picture(title, pictures[name]) for name, (title, _) in PLOTS.items()
              if name in pictures]
    if found.weights:
        rows = [(row.name, *row.shown(), '; '.join(
            f'{name} {value:.2g}' for name, value in row.largest[:3]), row.note)
                for row in found.weights]
        parts.append(section('Checkpoints', table(
            ('file', 'distance', 'relative', 'largest relative distances', ''), rows,
            [bool(row.distance) for row in found.weights], code=(0, 3))))
    parts += [section('Notes', listing(found.notes)), section('What next', listing(advice(found)))]
    return document(f'{found.a.name} and {found.b.name}', parts)


def _manifest(found: Comparison) -> str:
    if not found.manifest:
        known = is_known(found.a) and is_known(found.b)
        return ('<p>No difference in what was recorded.</p>' if known else
                '<p>Nothing was recorded of what one of the runs was made of.</p>')
    parts = []
    for severity in dict.fromkeys(row.severity for row in found.manifest):
        rows = [(row.name, row.then, row.now, row.consequence) for row in found.manifest
                if row.severity == severity]
        body = table(('', 'A', 'B', 'consequence'), rows, code=(0, 1, 2))
        is_open = '' if severity == 'harmless' else ' open'
        parts.append(f'<details{is_open}><summary>{escape(severity)}: {len(rows)}</summary>{body}'
                     '</details>')
    return ''.join(parts)


def advice(found: Comparison) -> list[str]:
    """What to do with this outcome, in the order of usefulness."""
    items = []
    changing = [row.name for row in found.manifest if row.severity == 'changes bits']
    if changing and not found.equal:
        items.append(f'First make these equal, they change bits: {listed(changing, 6)}')
    if not found.exact:
        items.append('Record fingerprints: mmrepro train CONFIG --fingerprint')
    elif found.first is not None and not changing:
        items.append(f'mmrepro localise {found.a.path} {found.b.path} names the operator, '
                     'transform or hook behind it')
    if found.exact and not found.diverged and found.first is not None:
        items.append('mmrepro train CONFIG --fingerprint parameter shows in which parameters it '
                     'begins')
    if not found.equal:
        items.append('docs/how-to/my-runs-differ.md leads from symptom to fix')
    return items
