"""Pages: links lead somewhere, tables stay readable; the notebook is executed in a copy."""
from __future__ import annotations

import importlib
import importlib.util
import json
import os
import re
import shutil
import sys
import unicodedata
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / 'docs'
PAGES = sorted(DOCS.rglob('*.md'))
OUTSIDE = [ROOT / name for name in (
    'README.md', 'README_zh-CN.md', 'CONTRIBUTING.md', 'CHANGELOG.md')]
MAX_CELL = 100  # characters of a table cell, without the addresses of links


def prose(page: Path) -> str:
    text = re.sub(r'^( *)```.*?^\1```', '', page.read_text(encoding='utf-8'), flags=re.S | re.M)
    return re.sub(r'`[^`\n]*`', '`code`', text)


def slug(title: str) -> str:
    """Return the anchor of a heading, as Python-Markdown's ``toc`` makes it."""
    title = re.sub(r'\[([^\]]*)\]\([^)]*\)', r'\1', title).replace('`', '').replace('*', '')
    plain = unicodedata.normalize('NFKD', title).encode('ascii', 'ignore').decode()
    return re.sub(r'[-\s]+', '-', re.sub(r'[^\w\s-]', '', plain).strip().lower())


def anchors(page: Path) -> set[str]:
    text = re.sub(r'^( *)```.*?^\1```', '', page.read_text(encoding='utf-8'), flags=re.S | re.M)
    return {slug(title) for title in re.findall(r'^#+ (.*)$', text, re.M)} | set(
        re.findall(r'\bid="([^"]+)"', text))


def links(page: Path) -> Iterator[str]:
    for target in re.findall(r'\]\(([^)\s]+)\)', prose(page)):
        if not re.match(r'[a-z]+:', target):
            yield target


# of the site, where a figure has a light and a dark form
THEMES = ('only-light', 'only-dark')


def broken(page: Path) -> Iterator[str]:
    for link in links(page):
        path, _, anchor = link.partition('#')
        target = (page.parent / path).resolve() if path else page
        if not target.exists():
            yield f'{link}: there is no such file'
        elif page.is_relative_to(DOCS) and not target.is_relative_to(DOCS):
            yield f'{link}: lies outside of docs, so the site cannot show it'
        elif anchor and anchor not in THEMES and anchor not in anchors(target):
            yield f'{link}: the page has no such heading'


def cells(page: Path) -> Iterator[tuple[str, str]]:
    for line in page.read_text(encoding='utf-8').splitlines():
        if line.startswith('|'):
            for cell in re.split(r'(?<!\\)\|', line)[1:-1]:
                yield line, re.sub(r'\]\([^)]*\)', ']', cell.strip())


def name(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.mark.parametrize('page', [*PAGES, *OUTSIDE], ids=name)
def test_every_link_leads_to_a_file_and_a_heading(page):
    assert list(broken(page)) == []


def test_every_page_is_in_the_navigation_once():
    text = (ROOT / 'mkdocs.yml').read_text(encoding='utf-8')
    listed: list[str] = re.findall(r'^ *- (?:[^:\n]+: )?(\S+\.md)$', text, re.M)
    assert sorted(listed) == [page.relative_to(DOCS).as_posix() for page in PAGES]
    assert [page for page in PAGES if '\n# ' not in '\n' + page.read_text('utf-8')] == []


@pytest.mark.parametrize('page', [*PAGES, *OUTSIDE], ids=name)
def test_every_cell_of_a_table_fits_a_line(page):
    assert [line for line, cell in cells(page)
            if max(map(len, cell.split('<br>'))) > MAX_CELL] == []


def test_every_randomness_key_is_documented_with_its_default():
    from mmrepro.config import RandomnessConfig
    text = (DOCS / 'reference' / 'randomness.md').read_text(encoding='utf-8')
    documented = dict(re.findall(
        r'^###? ([\w.]+)\n\n(?:\*.*?Default: `([^`]+)`\.\*$)?', text, re.M))
    defaults = {}
    for key, value in RandomnessConfig().as_dict().items():
        defaults[key] = repr(value)
        if isinstance(value, dict) and value:  # a section
            defaults.update({f'{key}.{part}': repr(default) for part, default in value.items()})
            documented[key] = defaults[key]
    documented['virtual_ranks.ranks'] = 'None'  # as of the section
    assert documented == defaults
    assert re.findall(r'^## (\w+)$', text, re.M) == [*RandomnessConfig().as_dict()]


def test_pages_that_the_code_names_exist():
    # tests of the generator make pages of their own
    files = [path for folder in ('mmrepro', 'tests', 'dev', 'tools', 'benchmarks', 'configs')
             for path in (ROOT / folder).rglob('*.py')
             if '.mim' not in path.parts and path.name != 'test_tools_of_dev.py']
    named = {(name(path), page) for path in files
             for page in re.findall(r"(?:\bdocs/|page\(')([\w/-]+\.md)\b",
                                    path.read_text(encoding='utf-8'))}
    assert [one for one in sorted(named) if not (DOCS / one[1]).exists()] == []


def test_modules_that_the_architecture_names_exist():
    text = (DOCS / 'explanation' / 'architecture.md').read_text(encoding='utf-8')
    table = text[text.index('## Where a concept lives'):text.index('## Layers')]
    modules = re.findall(r'`([\w/]+\.py)`', table)
    assert len(modules) > 20
    assert [module for module in modules if not (
        (ROOT / 'mmrepro' / module).exists() or (ROOT / module).exists())] == []


def test_links_that_lead_nowhere_are_found(tmp_path, monkeypatch):
    monkeypatch.setattr(f'{__name__}.DOCS', tmp_path)
    page = tmp_path / 'a.md'
    page.write_text('# A title: *with* `code`\n\n[good](#a-title-with-code) [no file](b.md) '
                    '[no heading](a.md#b) [outside](../) `[code](c.md)`\n')
    assert [found.partition(':')[0] for found in broken(page)] == ['b.md', 'a.md#b', '../']


def imported_names() -> Iterator[tuple[str, str, str]]:
    for page in [*PAGES, *OUTSIDE]:
        for module, names in re.findall(r'^ *from (mmrepro[\w.]*) import ([\w, ]+)$',
                                        page.read_text(encoding='utf-8'), re.M):
            yield from ((name(page), module, one.strip()) for one in names.split(','))


@pytest.mark.parametrize('page, module, imported', sorted(imported_names()))
def test_names_that_examples_import_exist(page, module, imported):
    found = importlib.import_module(module)
    assert hasattr(found, imported) or importlib.util.find_spec(f'{module}.{imported}')


def parts(page: Path) -> tuple[list[str], list[str], list[str]]:
    text = page.read_text(encoding='utf-8')
    code = re.findall(r'^```.*?^```', text, re.S | re.M)
    return (re.findall(r'^#+(?= )', prose(page), re.M), code,
            [link for link in links(page) if not link.startswith('README')])


def test_the_readme_is_the_same_in_both_languages():
    assert parts(ROOT / 'README.md') == parts(ROOT / 'README_zh-CN.md')


def test_both_readmes_have_the_measured_cost_of_an_iteration():
    measured = json.loads((ROOT / 'docs' / 'results' / 'overhead_cpu.json').read_text())
    cost = f"{100 * (measured['iteration']['ratio'] - 1):.1f} %"
    for name in ('README.md', 'README_zh-CN.md'):
        line, = (line for line in (ROOT / name).read_text(encoding='utf-8').splitlines()
                 if line.startswith('- [') and '(docs/evidence/cost.md)' in line)
        assert cost in line


NOTEBOOK = ROOT / 'demo' / 'mmrepro_in_10_minutes.ipynb'
# text in the source of a cell -> what its output says
SHOWS = {
    'runs/monday --fin': 'weights (\\w{16}), averages (\\w{16}) after 6 iterations\\s+'
                         'weights \\1, averages \\2 after 6',
    "'runs/tuesday'": 'SAME BITS', '--vary resume': 'SAME BITS',
    "'runs/wednesday')": 'DIFFERENT: iteration 0: lr', '--virtual-ranks': 'SAME BITS',
}


def outputs(cells):
    for cell in cells:
        if cell['cell_type'] == 'code':
            yield ''.join(cell['source']), re.sub(r'\x1b\[[0-9;]*m', '', ''.join(
                ''.join(one.get('text', '')) for one in cell['outputs']))


def check(cells):
    found = list(outputs(cells))
    for source, said in SHOWS.items():
        (text, ) = (text for code, text in found if source in code)
        assert re.search(said, text), (source, text)
    figures = sum('image/png' in one.get('data', ()) for cell in cells
                  for one in cell.get('outputs', ()))
    assert figures == 2


def test_what_is_committed_was_executed_from_top_to_bottom():
    content = NOTEBOOK.read_text(encoding='utf-8')
    cells = json.loads(content)['cells']
    check(cells)
    counts = [cell['execution_count'] for cell in cells if cell['cell_type'] == 'code']
    assert counts == [*range(1, len(counts) + 1)]
    assert 'Traceback' not in content and not re.search('/(home|root|tmp|work)/', content)
    links = re.findall(r'\]\((\.\./[^)#]+)', content)
    assert links and all((NOTEBOOK.parent / link).exists() for link in links)


@pytest.mark.nightly
def test_it_runs_and_shows_what_is_committed(tmp_path, monkeypatch):
    import nbformat
    from nbclient import NotebookClient
    monkeypatch.setenv('PATH', f'{Path(sys.executable).parent}{os.pathsep}{os.environ["PATH"]}')
    (tmp_path / 'demo').mkdir()
    shutil.copytree(ROOT / 'configs', tmp_path / 'configs')
    notebook = nbformat.read(NOTEBOOK, 4)
    NotebookClient(notebook, timeout=1800, coalesce_streams=True,
                   resources=dict(metadata=dict(path=str(tmp_path / 'demo')))).execute()
    check(notebook.cells)
