"""Results on a terminal, and in a file."""
import re

import pytest

from mmrepro.report.terminal import show

TEXT = '''  workers     another number of workers  equal
  cause     clock: [not markup] ''' + 'x' * 200 + '''
  fix       Seed it.

SAME BITS: all'''


def test_without_a_terminal_the_text_is_printed_as_it_is(capsys, monkeypatch):
    monkeypatch.delenv('FORCE_COLOR', raising=False)
    show(TEXT)
    assert capsys.readouterr().out == TEXT + '\n'


@pytest.mark.parametrize('word', ['equal', 'SAME BITS', 'Seed it.'])
def test_what_counts_is_coloured(word, capsys, monkeypatch):
    monkeypatch.setenv('FORCE_COLOR', '1')
    monkeypatch.setenv('TERM', 'xterm')
    monkeypatch.delenv('NO_COLOR', raising=False)
    show(TEXT)
    out = capsys.readouterr().out
    assert re.search(r'\x1b\[[0-9;]*3[0-9]m' + re.escape(word) + r'\x1b\[0m', out)
    assert re.sub(r'\x1b\[[0-9;]*m', '', out) == TEXT + '\n'
