"""Docstrings are written for Sphinx and shown by MkDocs."""
from dev.site_hooks import on_page_content


def test_roles_become_code():
    html = '<p>raises :class:<code>Wrong</code>, see :func:<code>~a.b.run</code> and ratio 1:2</p>'
    assert on_page_content(html) == (
        '<p>raises <code>Wrong</code>, see <code>run</code> and ratio 1:2</p>')
