"""Variables: who reads the environment, and those of user code, which a block captures."""
import ast
import os
import threading

import pytest
from mmengine.runner import Runner
from small_runs import finish, small_run

from mmrepro.facts import variables
from mmrepro.facts.collect import environment, is_hidden, without_secrets
from mmrepro.facts.collect import other_variables as recorded
from mmrepro.facts.variables import Read

READERS = {
    'getenv': lambda name: os.getenv(name),
    'get': lambda name: os.environ.get(name, 'default'),
    'in': lambda name: name in os.environ,
    'setdefault': lambda name: os.environ.setdefault(name, '1'),
    'copy': lambda name: os.environ.copy(),
    'dict': lambda name: {**os.environ},
    'items': lambda name: list(os.environ.items()),
    'library': lambda name: __import__('shutil').get_terminal_size(),  # reads COLUMNS
}


@pytest.mark.parametrize('reader', READERS)
def test_reads_are_noted_with_their_line(reader, monkeypatch):
    name = f'TEST_VARIABLE_{reader.upper()}'
    monkeypatch.setenv('SOMETHING', 'else')
    before = variables.reads()
    READERS[reader](name)
    line = READERS[reader].__code__.co_firstlineno
    assert [read for read in variables.reads() if read not in before] == (
        [] if reader in ('copy', 'dict', 'items', 'library') else
        [Read(name, None, __name__, __file__, line)])
    os.environ.pop(name, None)


def test_forked_workers_report_their_reads(monkeypatch):
    monkeypatch.setenv('TEST_OF_WORKER', '2')
    variables.share()
    child = os.fork()
    if not child:
        os.environ.get('TEST_OF_WORKER')
        os._exit(0)
    os.waitpid(child, 0)
    assert [read.value for read in variables.reads() if read.name == 'TEST_OF_WORKER'] == ['2']


def test_a_secret_is_compared_and_not_written():
    first, second = (recorded([Read('MY_TOKEN', value, 'm', 'm.py', 3)])['MY_TOKEN']['value']
                     for value in ('correct horse', 'battery staple'))
    assert first != second and first.startswith('(not recorded, SHA-256 ') and len(first) < 32
    # set by the code after it was read; the launcher's; what the fixed list has
    reads = [Read(name, value, 'm', 'm.py', 3) for name, value in (
        ('GAIN', None), ('GAIN', '1'), ('LOCAL_RANK', '0'), ('OMP_NUM_THREADS', '2'))]
    assert recorded(reads) == dict(GAIN=dict(value='1', read='m.py:3'))


# planted: none of them opens anything
FAKES = {
    'postgres://me:pa/ss@db.example/x': 'pa/ss', 'https://0123abcd@sentry.example/4': '0123abcd',
    'https://u:p@ss@host/x': 'p@ss', 's3?X-Amz-Signature=abcd1234&x=1': 'abcd1234',
    'host=db password=hunter22 port=3': 'hunter22', **{secret: secret for secret in (
        'ghp_' + 'a' * 36, 'hf_' + 'b' * 30, 'AKIA' + 'A' * 16, 'xoxb-' + '1' * 12,
        'sk-' + 'a1' * 12, 'eyJhbGciOiJI.eyJzdWIiOiIx.abc', 'github_pat_' + 'c' * 22,
        'glpat-' + 'd' * 20, 'ASIA' + 'B' * 16, 'AIza' + 'e' * 35, 'npm_' + 'f' * 36,
        'pypi-' + 'g' * 50, '-----BEGIN RSA PRIVATE KEY-----' + 'h' * 9)}}
HARMLESS = ('http://localhost:8080/img@2x.png', 'mask-rcnn_r50_fpn_1x_coco_20200101_abcdefgh',
            'https://download.openmmlab.com/x@y.pth', 'http://proxy:3128', 'author=me')


@pytest.mark.parametrize('value', FAKES)
def test_a_secret_is_known_by_its_form_whatever_the_name_of_the_variable(value):
    shown = recorded([Read('SOURCE', value, 'm', 'm.py', 3)])['SOURCE']['value']
    assert FAKES[value] not in shown and is_hidden(shown) and without_secrets(shown) == shown
    code = without_secrets(f'x = {value!r}', code=True)
    assert (FAKES[value] not in code or 'password' in value) and ast.parse(code)
    assert environment({'CUDA_X': value})['CUDA_X'] == shown


@pytest.mark.parametrize('value', HARMLESS)
def test_what_is_no_secret_stays(value):
    assert without_secrets(value) == value == without_secrets(value, code=True)


def test_literals_with_a_secret_name_are_hidden_in_code_and_it_stays_python():
    code = without_secrets("a = dict(api_key='0123456789', keypoint_head='abcdefgh', lr=0.1)", True)
    assert '0123456789' not in code and 'abcdefgh' in code and ast.parse(code)


@pytest.mark.parametrize('late', [False, True])
def test_a_resume_compares_the_variables_that_user_code_reads(late, monkeypatch, tmp_path):
    name = f'TEST_GAIN_{late}'
    monkeypatch.setenv(name, '1')
    os.environ.get(name)
    finish(small_run(tmp_path))
    monkeypatch.setenv(name, '2')
    monkeypatch.setattr(variables, '_reads', {})
    if not late:  # else it is read by a worker, or in the middle of the training
        os.environ.get(name)
    runner = Runner.from_cfg(small_run(tmp_path, resume=True))
    runner.train()
    assert f"variables.{name} '1' -> '2'" in runner.lifecycle.comparison.history


def _function(body, padding):
    space = {'os': os}
    lines = ['x = 1'] * (padding % 8) + ['x = -x'] * (padding // 8)  # of 4 and 6 bytes
    exec('def function(x=1):\n ' + '\n '.join([*lines, f'return {body}']), space)
    return space['function']


def test_a_read_in_a_frame_that_was_given_the_memory_of_a_copy_is_noted():
    wanted = [f'TEST_AFTER_{copied}_{read}' for copied in range(16) for read in range(16)]
    for name in wanted:
        _, copied, read = name.rsplit('_', 2)
        _function('0, os.environ.keys()', int(copied))()
        _function(f'os.environ.get("{name}")', int(read))()
    seen = {read.name for read in variables.reads()}
    assert [name for name in wanted if name not in seen] == []


def test_a_copy_during_a_copy_of_another_thread_is_no_read():
    def reader():
        os.environ.keys()
        os.environ.get('TEST_OF_THREAD')

    class Meanwhile(type(os.environ)):
        """An environment that another thread reads while it is copied."""
        def __iter__(self):
            thread = threading.Thread(target=reader)
            thread.start()
            thread.join()
            return super().__iter__()

    watched, os.environ.__class__ = type(os.environ), Meanwhile
    before = variables.reads()
    try:
        assert {**os.environ}
    finally:
        os.environ.__class__ = watched
    assert [read.name for read in variables.reads() if read not in before] == ['TEST_OF_THREAD']
