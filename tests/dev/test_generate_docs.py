"""Tables in the docs are made from what they show; docstrings are shown as they were meant."""
import importlib.util
from pathlib import Path

import pytest

from dev.site_hooks import on_page_content

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def pages():
    spec = importlib.util.spec_from_file_location('pages', ROOT / 'dev' / 'generate_docs.py')
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_pages_show_the_tables_and_the_figures(pages):
    assert pages.stale(write=False) == [], 'run `python dev/generate_docs.py`'


def test_a_page_that_is_out_of_date_is_named_and_regenerated(pages, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(pages, 'DOCS', tmp_path)
    monkeypatch.setattr(pages, 'PARTS', (('a.md', 'us', lambda: '| new |'),
                                         ('b.md', '', lambda: 'all')))
    a, b = tmp_path / 'a.md', tmp_path / 'b.md'
    old = 'head\n<!-- made by: us -->\n| old |\n<!-- end of what us made -->\nfoot\n'
    a.write_text(old)
    b.write_text('all')
    assert pages.main(['--check']) == 1 and a.read_text() == old
    assert pages.main([]) == 0 and a.read_text() == old.replace('old', 'new')
    assert pages.main(['--check']) == 0
    assert capsys.readouterr().out == 'docs/a.md: out of date\ndocs/a.md: regenerated\n'
    for text in ('nothing', '<!-- made by: us -->'):
        a.write_text(text)
        with pytest.raises(ValueError, match='the page has no <!-- '):
            pages.main([])
        assert a.read_text() == text


def test_roles_of_sphinx_become_code():
    html = '<p>raises :class:<code>Wrong</code>, see :func:<code>~a.b.run</code> and ratio 1:2</p>'
    assert on_page_content(html) == (
        '<p>raises <code>Wrong</code>, see <code>run</code> and ratio 1:2</p>')
