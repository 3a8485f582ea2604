"""`mmrepro doctor --operators` and its tables agree with the table of operators."""
import json
import re

import pytest

from dev.operator_report import as_markdown
from mmrepro import cli, ops
from mmrepro.cli.doctor import main
from mmrepro.ops import TABLE, catalogue
from mmrepro.ops.operator_table import OF_FORKS


def rows_of(text):
    lines = [line for line in text.splitlines()[1:] if line.split()]
    return {line.split()[0]: re.split(r'\s\s+', line.strip()) for line in lines}


@pytest.mark.usefixtures('torch_operators')
@pytest.mark.parametrize('device', ['cpu', 'cuda'])
def test_every_operator_has_a_line(capsys, device):
    assert main(['--device', device, '--operators', 'torch']) == 0
    out = capsys.readouterr().out
    rows = rows_of(out)
    assert set(TABLE) <= set(rows)
    assert rows['nms'][1:3] == ['torch', 'yes']
    assert rows['nms'][3:] == ['the same bits with any mmcv', TABLE['nms'].users]
    assert rows['knn_forward'][1:3] in (['none', '-'], ['compiled', 'yes'])
    assert f'0 not deterministic on {device}' in out or 'compiled' in out


@pytest.mark.compiled
def test_compiled_kernels_with_atomics_are_named(compiled, capsys):
    with compiled():
        for device, verdict in (('cpu', 'yes'), ('cuda', 'NO')):
            main(['--device', device, '--operators', 'compiled'])
            rows = rows_of(capsys.readouterr().out)
            assert rows['roi_align_backward'][1:3] == ['compiled', verdict]
            assert rows['roi_align_forward'][1:3] == ['compiled', 'yes']


@pytest.mark.usefixtures('torch_operators')
def test_json_holds_the_catalogue(capsys):
    assert cli.main(['doctor', '--operators', '--json', '--device', 'cuda']) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told['provider'], told['device']) == ('auto', 'cuda')
    assert told['operators'] == [entry._asdict() for entry in catalogue('cuda', 'auto')]
    assert all(entry['reason'] for entry in told['operators'])


def test_the_tables_have_every_operator():
    assert [name for name in TABLE if f'`{name}`' not in as_markdown()] == []
    made = as_markdown({'deform_conv_forward': ['tood', 'dcn']}).splitlines()
    row = next(line for line in made if line.startswith('| `deform_conv_forward`'))
    assert row.endswith('| 2 |')


@pytest.mark.usefixtures('torch_operators')
@pytest.mark.parametrize('name', [name for name, row in TABLE.items() if not row.target])
def test_what_has_no_implementation_says_what_to_install(name):
    import mmcv._ext
    if ops.is_compiled():
        assert callable(getattr(mmcv._ext, name, None)) is (name not in OF_FORKS)
        return
    package = 'onedl-mmcv==2.3.6' if name in OF_FORKS else 'mmcv==2.1.0'
    with pytest.raises(NotImplementedError, match=f'{name}.*{TABLE[name].source}.*{package}'):
        getattr(mmcv._ext, name)()
