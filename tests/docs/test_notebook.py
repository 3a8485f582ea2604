"""The notebook, executed in a copy of its folder, and what is committed of it."""
import json
import os
import re
import shutil
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOK = ROOT / 'demo' / 'mmrepro_in_10_minutes.ipynb'
# text in the source of a cell -> what its output says
SHOWS = {
    'runs/monday --fin': 'weights ([0-9a-f]{16}) after 6 iterations\\s+weights \\1 after 6',
    "'runs/tuesday'": 'SAME BITS', '--vary kills': 'all bits equal',
    "'runs/wednesday')": 'DIFFERENT: iteration 0: lr', '--virtual-ranks': 'SAME BITS',
}


def outputs(cells):
    """Return source and text of the code cells."""
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
