"""The fixture ``same_bits``: bits in a file beside the test, for each class of machines."""
import json
import os
import re
import sys

import pytest
from harness import ROOT, Child, python

from mmrepro.errors import GoldenError
from mmrepro.verbs.golden import KeptBits, digests

MODULE = '''
import torch

def test_step(same_bits):
    model = torch.nn.Linear(2, 1)
    torch.nn.init.constant_(model.weight, {weight})
    same_bits(dict(loss=model.weight.sum(), weights=dict(weight=model.weight)))
    same_bits([1, 'two'])
'''


def _run(folder, arguments):
    os.chdir(folder)
    with open('said.txt', 'w') as sys.stdout:
        # no:faulthandler: its thread, which has a lock, is not in a fork
        code = pytest.main(['-p', 'no:mmrepro', '-p', '_mmrepro_pytest', '-p', 'no:cacheprovider',
                            '-p', 'no:faulthandler', '--rootdir', '.', '-rs', '-s', *arguments])
    return int(code)


def run(folder, *arguments, weight=1.5, text=MODULE):
    (folder / 'test_module.py').write_text(text.replace('{weight}', str(weight)))
    code = Child(_run, folder, ['test_module.py', *arguments]).result()
    return code, ' '.join((folder / 'said.txt').read_text().split())


def test_bits_are_kept_and_compared(tmp_path):
    code, said = run(tmp_path)
    assert code == 1
    assert 'test_module.json has no bits of test_step; pytest --mmrepro-update keeps' in said
    code, said = run(tmp_path, '--mmrepro-update')
    assert code == 0 and '1 passed' in said
    assert run(tmp_path)[0] == 0
    code, said = run(tmp_path, weight=1.25)
    assert code == 1 and '2 of 2 values have different bits from those in' in said
    assert 'the first one is loss' in said

    path = tmp_path / 'same_bits' / 'test_module.json'
    content = json.loads(path.read_text())
    (tests, ) = content['bits'].values()
    assert [list(call) for call in tests['test_step']] == [['loss', 'weights.weight'], ['0', '1']]
    content['bits'] = dict(another=tests)
    path.write_text(json.dumps(content))
    code, said = run(tmp_path)
    assert code == 0 and '1 skipped' in said
    assert 'has bits of test_step for other machines and versions, and this is' in said
    assert run(tmp_path, '--mmrepro-update')[0] == 0  # beside those of the other class
    assert len(json.loads(path.read_text())['bits']) == 2


def test_half_a_test_is_neither_kept_nor_enough_and_more_is_new(tmp_path):
    run(tmp_path, '--mmrepro-update')
    path = tmp_path / 'same_bits' / 'test_module.json'
    before = path.read_text()
    fails = MODULE.replace("    same_bits([1, 'two'])", '    assert False')
    assert run(tmp_path, '--mmrepro-update', text=fails)[0] == 1 and path.read_text() == before
    code, said = run(tmp_path, text=MODULE.replace("    same_bits([1, 'two'])", ''))
    assert code == 1 and 'was called 1 times in test_step, and' in said
    code, said = run(tmp_path, text=MODULE + '    same_bits(3)\n')
    assert code == 1 and 'call 3 of same_bits in test_step is new' in said


def test_no_value_hides_another(tmp_path):
    kept = KeptBits(tmp_path / 'x.json', 'test')
    with pytest.raises(GoldenError, match="two values are called 'a.b'"):
        kept.next({'a': {'b': 1}, 'a.b': 2}, update=True)
    assert [name for name, _ in digests(dict(a=[], b={}))] == ['a', 'b']


def test_the_example_of_the_docs_repeats(tmp_path):
    page = (ROOT / 'docs/how-to/golden.md').read_text(encoding='utf-8')
    example = re.search('```python\n(.*?)```', page, re.S).group(1)
    assert run(tmp_path, '--mmrepro-update', text=example)[0] == 0
    assert '1 passed' in run(tmp_path, text=example)[1]
    code, said = run(tmp_path, text=example.replace('42', '43'))
    assert code == 1 and '3 of 3 values have different bits' in said


def test_pytest_does_not_import_mmrepro_for_other_tests(tmp_path):
    path = tmp_path / 'test_other.py'
    path.write_text("def test_other():\n    import sys\n    assert 'mmrepro' not in sys.modules\n")
    assert '1 passed' in python('-m', 'pytest', '-p', 'no:mmrepro', '-p', '_mmrepro_pytest', '-p',
                                'no:cacheprovider', path, cwd=tmp_path)


@pytest.mark.parametrize('text, message', [
    ('{', 'not JSON'), ('{"kind": "same_bits"}', 'lacks format'),
    ('{"kind": "golden", "format": 1, "classes": {}, "bits": {}}', 'not a file of same_bits')])
def test_a_damaged_file_is_an_error(tmp_path, text, message):
    path = tmp_path / 'x.json'
    path.write_text(text)
    with pytest.raises(GoldenError, match=message):
        KeptBits(path, 'test').next(1)
    assert path.read_text() == text


@pytest.mark.nightly
def test_processes_of_xdist_do_not_overwrite_each_others_bits(tmp_path):
    code, said = run(tmp_path, '--mmrepro-update', '-n', '1')
    assert code == 1 and 'run it with -n 0' in said
    assert not (tmp_path / 'same_bits').exists()
