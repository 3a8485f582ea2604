"""Reports on a terminal, in a file, as a web page and as data."""
import io
import json
import re

import pytest

from mmrepro.errors import DIFFERENT
from mmrepro.report.report import Figure, Report, Table

REPORT = Report(
    'a title', 'DIFFERENT: all', DIFFERENT,
    [Table((), [('cause', 'clock: [not markup]'), ('fix', 'Seed it. ' + 'x' * 200)],
           styles=['warn', 'fix']),
     Table(('name', 'value'), [('a', '1'), ('<b>', '2')], 'numbers', shown=1, rest='more')],
    ['a note'], ['an advice'], {'plot': Figure('A plot', lambda: b'PNG')}, dict(first=3))


def test_a_notebook_prints_the_text(monkeypatch):
    monkeypatch.setattr('rich.console._is_jupyter', lambda: True)
    assert 'DIFFERENT: all' in str(REPORT)


def test_without_a_terminal_the_text_is_plain_and_whole(capsys, monkeypatch):
    monkeypatch.delenv('FORCE_COLOR', raising=False)
    monkeypatch.delenv('COLUMNS', raising=False)
    REPORT.show()
    out = capsys.readouterr().out
    assert 'clock: [not markup]' in out and 'x' * 200 in out and '\x1b' not in out
    assert [line.strip() for line in out.splitlines()[-4:]] == [
        '', 'note: a note', 'DIFFERENT: all', 'an advice']
    assert '1 more' in out and '<b>' not in out
    assert str(REPORT) == out
    REPORT.show(everything=True)  # all rows
    out = capsys.readouterr().out
    assert '<b>' in out and '1 more' not in out


@pytest.mark.parametrize('word', ['DIFFERENT: all', 'clock: [not markup]', 'note: a note'])
def test_verdicts_and_rows_are_colored(word, capsys, monkeypatch):
    monkeypatch.setenv('FORCE_COLOR', '1')
    monkeypatch.setenv('TERM', 'xterm')
    monkeypatch.delenv('NO_COLOR', raising=False)
    REPORT.show()
    assert re.search(r'\x1b\[[0-9;]*3[0-9]m[^\x1b]*' + re.escape(word), capsys.readouterr().out)


def test_the_same_report_as_a_page_as_data_and_in_files(tmp_path):
    page = REPORT.html()
    assert '<h1>a title</h1>' in page and '&lt;b&gt;' in page and 'base64,UE5H' in page
    assert '<b>' not in page
    assert json.loads(REPORT.json()) == dict(
        exit_code=1, verdict='DIFFERENT: all', notes=['a note'], first=3)
    written = REPORT.write(str(tmp_path), 'name')
    assert sorted(written) == ['name.html', 'name.json', 'plot.png']
    assert (tmp_path / 'plot.png').read_bytes() == b'PNG'


@pytest.mark.parametrize('styled', [False, True])
def test_no_line_ends_with_blanks(styled, monkeypatch):
    from mmrepro.report import report
    from mmrepro.report.report import Table
    if styled:
        monkeypatch.setenv('COLUMNS', '100')
        monkeypatch.setenv('FORCE_COLOR', '1')
    out = io.StringIO()
    report.print_table(report.console(out), Table(
        ('name', 'note'), [('a', 'a long text'), ('b', ''), ('c', 'x')], 'Title',
        ['bad', 'good', '']), True)
    lines = [re.sub(r'\x1b\[[0-9;]*m', '', line) for line in out.getvalue().split('\n')]
    assert len(lines) >= 5 and [line for line in lines if line != line.rstrip()] == []


def test_without_a_terminal_two_lines_of_progress_a_second_are_printed():
    from mmrepro.runs.launcher import progress_line
    out, now = io.StringIO(), [0.]
    with progress_line(out, lambda: now[0]) as on_progress:
        for now[0], text in ((0., 'first'), (.1, 'too soon'), (.3, 'replaced'), (.6, 'second'),
                             (.7, 'waits'), (.8, 'the end')):
            on_progress(text)
    assert out.getvalue().splitlines() == ['first', 'second', 'the end']
