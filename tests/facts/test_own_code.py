"""Own code is a fact: every imported file that is neither the standard library nor installed."""
import base64
import hashlib
import importlib
import importlib.metadata
import os
import sys
import zipfile

import pytest
import torch
from mmengine.runner import Runner
from small_runs import small_run

from mmrepro.distributed import agreement
from mmrepro.errors import AgreementError
from mmrepro.facts import collect, own_code
from mmrepro.facts.compatibility import CHANGES, MAY, differences
from mmrepro.util import libraries

TEXT = 'GAIN = 1\n'


def test_own_code_of_a_run_in_a_test_is_that_of_its_module():
    assert [name for name in sys.modules if name.startswith(('test_', 'dev.'))] == [__name__]


@pytest.fixture
def imported(monkeypatch, tmp_path):
    """Return a function that imports modules from folders of ``tmp_path``, and finds own files."""
    before = set(sys.modules)
    monkeypatch.setattr(own_code, '_seen', {})
    monkeypatch.setattr(own_code, '_looked_at', {*before} - {'__main__'})

    def look(*modules, path=('.', )):
        for folder in path[::-1]:
            monkeypatch.syspath_prepend(str(tmp_path / folder))
        for module in modules:
            importlib.import_module(module)
        return {name: source for name, source in own_code.sources().items()
                if source.module.startswith('own_')}

    yield look
    for name in set(sys.modules) - before:
        if name.startswith('own_'):
            del sys.modules[name]


def write(path, text=TEXT):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def install(folder, name, files, record=None):
    """Install a distribution as pip does; ``record`` are the files that it lists."""
    lines = []
    for path in files:
        content = (folder / path).read_bytes()
        digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b'=').decode()
        lines.append(f'{path},sha256={digest},{len(content)}')
    info = folder / f'{name}-1.0.dist-info'
    write(info / 'METADATA', f'Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n')
    write(info / 'RECORD', '\n'.join([*lines, f'{info.name}/RECORD,,']))


def digest(text=TEXT):
    return hashlib.sha256(text.encode()).hexdigest()


def test_a_package_without_git_is_recorded_file_by_file(imported, tmp_path):
    write(tmp_path / 'own_a' / '__init__.py', '')
    path = write(tmp_path / 'own_a' / 'inner.py')
    write(tmp_path / 'own_a' / 'not_imported.py')
    found = imported('own_a.inner')
    assert found.keys() == {'own_a/__init__.py', 'own_a/inner.py'}
    assert found['own_a/inner.py'] == own_code.Source('own_a.inner', str(path), digest())
    assert own_code.code_facts()['source.own_a/inner.py'] == digest()[:16]


def editable_by_path(root):
    write(root / 'src' / 'own_e.py')
    write(root / 'site-packages' / '__editable__.own_e.pth', str(root / 'src'))
    install(root / 'site-packages', 'own-e', ['__editable__.own_e.pth'])
    write(root / 'site-packages' / 'own_e-1.0.dist-info' / 'direct_url.json',
          '{"url": "file:///x", "dir_info": {"editable": true}}')
    return 'src', 'site-packages'


def egg_link(root):
    """``setup.py develop`` leaves its metadata beside the sources."""
    write(root / 'src' / 'own_e.py')
    write(root / 'src' / 'own_e.egg-info' / 'PKG-INFO', 'Name: own-e\nVersion: 1.0\n')
    write(root / 'src' / 'own_e.egg-info' / 'top_level.txt', 'own_e\n')
    return ('src', )


def loose(root):
    """A file that somebody has copied into the folder of installed packages."""
    write(root / 'site-packages' / 'own_e.py')
    write(root / 'site-packages' / 'other.py')
    install(root / 'site-packages', 'other', ['other.py'])
    return ('site-packages', )


def edited_in_place(root):
    path = write(root / 'site-packages' / 'own_e.py', 'GAIN = 2\n')
    install(root / 'site-packages', 'own-e', ['own_e.py'])
    path.write_text(TEXT)
    os.utime(path, (path.stat().st_mtime + 10, ) * 2)
    return ('site-packages', )


def zipped(root):
    with zipfile.ZipFile(root / 'code.zip', 'w') as archive:
        archive.writestr('own_e.py', TEXT)
    return ('code.zip', )


def linked(root):
    write(root / 'elsewhere' / 'real.py')
    (root / 'path').mkdir()
    (root / 'path' / 'own_e.py').symlink_to(root / 'elsewhere' / 'real.py')
    return ('path', )


@pytest.mark.parametrize('kind', [editable_by_path, egg_link, loose, edited_in_place, zipped,
                                  linked])
def test_wherever_own_code_lies_it_is_found(kind, imported, tmp_path):
    found = imported('own_e', path=kind(tmp_path))
    assert {name: source.sha256 for name, source in found.items()} == {'own_e.py': digest()}


@pytest.mark.parametrize('folder', ['site-packages', 'target'])
def test_a_file_of_an_installed_distribution_is_a_library(folder, imported, tmp_path):
    write(tmp_path / folder / 'own_l' / '__init__.py', '__version__ = "3"\n')
    install(tmp_path / folder, 'own-fork', ['own_l/__init__.py'])
    assert imported('own_l', path=(folder, )) == {}
    assert own_code.versions()['own-fork'] == '1.0'
    # a fork is named, because its version may be that of the original
    assert libraries.version_of('own_l') == 'own-fork 1.0'
    del sys.modules['own_l']
    assert libraries.version_of('own_l') == 'own-fork 1.0'
    assert libraries.is_standard(importlib.__file__) and not libraries.is_own(torch.__file__)


def test_another_folder_on_the_path_lets_no_other_be_read_again(monkeypatch, tmp_path):
    write(tmp_path / 'own_p.py')
    install(tmp_path, 'own-p', ['own_p.py'])
    libraries.providers(torch.__file__)
    read, stock = [], libraries._Installed

    def counted(metadata):
        read.append(metadata.metadata['Name'])
        return stock(metadata)

    monkeypatch.setattr(libraries, '_Installed', counted)
    monkeypatch.syspath_prepend(str(tmp_path))
    assert [found.name for found in libraries.providers(torch.__file__)] == ['torch']
    assert read == ['own-p']


def test_names_and_versions_of_packages_are_those_of_their_metadata():
    found = importlib.metadata.distributions()
    assert collect.packages() == {
        each.metadata['Name'].lower().replace('_', '-'): each.version for each in found}


def test_the_same_file_elsewhere_on_the_path_is_the_same(imported, tmp_path):
    for folder, text in (('a', TEXT), ('b', TEXT), ('c', 'GAIN = 2\n')):
        write(tmp_path / folder / 'own_m.py', text)
    facts = []
    for folder in 'abc':
        sys.modules.pop('own_m', None)
        imported('own_m', path=(folder, ))
        facts.append(own_code.code_facts())
    assert differences(facts[0], facts[1]) == []
    row, = differences(facts[1], facts[2])
    assert (row.name, row.severity) == ('source.own_m.py', MAY)


def test_what_is_loaded_counts_until_it_is_loaded_again(imported, tmp_path):
    path = write(tmp_path / 'own_n.py')
    imported('own_n')
    path.write_text('GAIN = 22\n')
    assert imported()['own_n.py'].sha256 == digest()
    importlib.reload(sys.modules['own_n'])
    assert imported()['own_n.py'].sha256 == digest('GAIN = 22\n')


def test_a_file_that_is_imported_later_is_compared_before(imported, tmp_path):
    write(tmp_path / 'own_p' / '__init__.py')
    write(tmp_path / 'own_p' / 'late.py')
    imported('own_p')
    now = own_code.code_facts()
    names = [f'source.own_p/{name}.py' for name in ('late', 'gone')]
    then = {**now, names[0]: digest('other')[:16], names[1]: digest()[:16], 'version.rich': '0.1'}
    rows = {row.name: row for row in differences(then, own_code.completed(then, now))}
    assert rows[names[0]].now == digest()[:16] and rows[names[1]].now == '(not set)'
    assert rows['version.rich'].severity == MAY and 'own_p.late' not in sys.modules


SEVERITIES = {
    'scipy': MAY, 'timm': MAY, 'shapely': MAY, 'torchvision': MAY, 'never-heard-of': MAY,
    'pycocotools': MAY, 'albumentations': MAY, 'numpy': CHANGES, 'scikit-learn': MAY}


@pytest.mark.parametrize('name', SEVERITIES)
def test_packages_that_compute_are_never_harmless(name):
    row, = differences({f'version.{name}': '1'}, {f'version.{name}': '2'})
    assert row.severity == SEVERITIES[name]
    # PAA fits mixtures with one, the transform Albu calls the other
    user = {'scikit-learn': {'config.model.bbox_head.type': 'PAAHead'},
            'albumentations': {'config.train_dataloader.dataset.pipeline[2].type': 'Albu'}}
    if name in user:
        row, = differences({f'version.{name}': '1', **user[name]},
                           {f'version.{name}': '2', **user[name]})
        assert row.severity == CHANGES


def test_ranks_with_other_code_stop_with_file_rank_and_machine():
    files = own_code.files()
    assert 'mmrepro/run/lifecycle.py' in files
    other = {**files, 'mmrepro/run/lifecycle.py': 'edited', 'only/here.py': '1'}
    with pytest.raises(AgreementError, match='lifecycle.py: rank 1 on node-b has edited') as caught:
        agreement._compare_files('code', [('node-a', files), ('node-b', other)])
    assert len(str(caught.value).splitlines()) == 2


def test_a_resume_with_edited_code_says_so_first_and_last(imported, tmp_path, caplog):
    path = write(tmp_path / 'own_t.py')
    imported('own_t')
    log = tmp_path / 'work'

    def train(**changes):
        runner = Runner.from_cfg(small_run(log, log_level='INFO', **changes))
        runner.train()
        return runner

    train(train_cfg=dict(by_epoch=True, max_epochs=1))
    path.write_text('GAIN = 3\n')
    importlib.reload(sys.modules['own_t'])
    for epochs in (2, 3):  # the second resume does not forget the first
        runner = train(train_cfg=dict(by_epoch=True, max_epochs=epochs), resume=True)
        text = next((log / runner.timestamp).glob('*.log')).read_text()
        lines = text[text.index('resuming from'):].splitlines()
        start = '\n'.join(lines[:10])
        assert 'edited code: own_t.py' in start
        assert start.index('if no bit depends on what differs') < start.index('same bits on')
        last = [line for line in text.splitlines() if line][-1]
        assert 'edited code: own_t.py' in last and 'may not be those' in last
    unchanged = train(train_cfg=dict(by_epoch=True, max_epochs=1), resume=False)
    assert unchanged.lifecycle.comparison.history == ''
