"""What mmrepro changes in a process stands on the page that lists it, and is undone as it says."""
import ast
import json
import os
import re
import subprocess
import sys
from fnmatch import fnmatchcase
from pathlib import Path

import pytest

from mmrepro.determinism.policy import missing_at_start

ROOT = Path(__file__).resolve().parents[1]
PAGE = (ROOT / 'docs' / 'explanation' / 'what-changes.md').read_text(encoding='utf-8')
# change by themselves: caches of Python and torch, counters, numbers of modules
BY_THEMSELVES = (
    '*._cache', '*_cache', '*.__slotnames__', '*.__warningregistry__', '*._instance_dict',
    'linecache.cache', 'logging._handlerList', 'pkgutil._NAME_PATTERN', 'posix.environ',
    'sys.modules', 'tempfile.tempdir', 'torch._opaque_base._FakeScriptObject_cls',
    'torch.library._impls',
    'torch.utils.hooks.RemovableHandle.next_id', 'weakref.finalize._registry')
# found -> as the page says it
SPELLINGS = {
    'class of os.environ': 'os.environ',
    'descriptor /*(deleted)': 'a temporary file without a name',
    'signal *': '{1}', 'variable *': '{1}', 'kernel aten/*/CPU': 'aten::{1}',
    'torch._weights_only_unpickler._marked_safe_globals_set': 'get_safe_globals',
    'torch.use_deterministic_algorithms': 'torch.deterministic_debug_mode',
}


@pytest.fixture(scope='module')
def found(tmp_path_factory):
    folder = tmp_path_factory.mktemp('process')
    paths = [str(ROOT), str(ROOT / 'tests' / 'support')]
    variables = {name: value for name, value in os.environ.items()
                 if name != 'CUBLAS_WORKSPACE_CONFIG'}
    subprocess.run(
        [sys.executable, '-W', 'ignore', ROOT / 'tests' / 'support' / 'process_state.py',
         folder / 'found.json', folder], check=True, capture_output=True,
        env={**variables, 'PYTHONPATH': os.pathsep.join(paths)})
    changes = json.loads((folder / 'found.json').read_text())
    for name, values in changes.items():
        if name not in ('hooks', ):
            changes[name] = [value for value in values if not any(
                fnmatchcase(value, pattern) for pattern in BY_THEMSELVES)]
    return changes


def listed_attributes():
    """Return the names of the page's list by module."""
    return {f'{module}.{name}'
            for module, names in re.findall(r'^- `([\w.]+)`: (.*)$', PAGE, re.M)
            for name in re.findall(r'`([^`]+)`', names)}


def said(name):
    """Return what has to be on the page."""
    for pattern, spelling in SPELLINGS.items():
        middle = re.fullmatch(re.escape(pattern).replace(r'\*', '(.*)'), name)
        if middle:
            return spelling.format('', *middle.groups())
    if name.startswith('mmcv._ext.'):
        return 'mmcv._ext'
    return '.'.join(name.split('.')[-2:])


def is_on_the_page(name):
    return name in listed_attributes() or name in PAGE or said(name) in PAGE


@pytest.mark.parametrize('moment', ['import', 'run', 'error', 'left'])
def test_the_page_has_everything_that_is_replaced_or_installed(found, moment):
    assert [name for name in found[moment] if not is_on_the_page(name)] == []
    assert found['import'] and found['run'] and found['deactivation']


def test_nothing_but_what_stays_is_left(found):
    stays = {said(name) for name in found['left'] if not name.startswith('mmcv._ext.')}
    assert stays == {'Runner.__new__', 'FlexibleRunner.__new__', 'config.FormatCode', 'SIGURG',
                     'a temporary file without a name'}


def replaced_for_a_block():
    """Yield the attributes of others that `replaced` changes, outside of virtual ranks."""
    for path in sorted((ROOT / 'mmrepro').rglob('*.py')):
        tree = ast.parse(path.read_text(encoding='utf-8'))
        foreign = {(alias.asname or alias.name).partition('.')[0] for node in ast.walk(tree)
                   if isinstance(node, ast.Import) or
                   isinstance(node, ast.ImportFrom) and not node.level for alias in node.names}
        for call in ast.walk(tree):
            if isinstance(call, ast.Call) and ast.unparse(call.func) == 'replaced' and call.args:
                owner = ast.unparse(call.args[0]).partition('.')[0]
                if owner in foreign and path.parent.name != 'virtual':
                    yield from (keyword.arg for keyword in call.keywords)


def test_what_is_replaced_for_the_length_of_a_call_is_on_the_page():
    in_other_words = {'load_from_http', '_passing_sync_batchnorm_handle', 'random_noise'}
    found = {*replaced_for_a_block()}
    assert {'imwrite', 'load'} < found and found >= in_other_words
    assert sorted(name for name in found - in_other_words if name not in PAGE) == []


def test_audit_hooks_are_on_the_page(found):
    assert found['hooks'] == 1 and 'sys.addaudithook' in PAGE


def test_a_run_that_an_error_ends_closes_its_files(found):
    """The process still has the runner, as a notebook has."""
    assert found['error'] == []


def test_variables_that_only_a_restart_sets_are_on_the_page():
    assert [name for name in missing_at_start({}, cpu='avx2') if f'`{name}`' not in PAGE] == []
