"""What is said of this machine, and of packages that are broken, outdated or untried together."""
import csv
import importlib
import importlib.metadata
import json
import re
import sys
from pathlib import Path

import cv2
import pytest
from command import exit_code, provider_stays  # noqa: F401  a fixture
from packaging.requirements import Requirement
from packaging.version import Version

from mmrepro.facts import collect
from mmrepro.verbs.doctor import environment, machine, package_problems

ROOT = Path(__file__).resolve().parents[2]
ROWS = list(csv.DictReader(
    (ROOT / 'mmrepro' / 'verbs' / 'packages.csv').read_text(encoding='utf-8').splitlines()))
LOCKED = dict(re.findall(r'^([\w-]+)==(\S+)$',
                         (ROOT / 'requirements' / 'lock.txt').read_text(), re.M))
SIZE = ('numpy.dtype size changed, may indicate binary incompatibility. Expected 96 from C header, '
        'got 88 from PyObject')


def problems(monkeypatch, packages, errors=None):
    """Return the problems of an environment: versions by package, import errors by module."""
    def version(name):
        if packages.get(name) is None:
            raise importlib.metadata.PackageNotFoundError(name)
        return packages[name]

    def import_module(name):
        if errors and name in errors:
            raise errors[name]

    with monkeypatch.context() as patch:
        patch.setattr(importlib.metadata, 'version', version)
        patch.setattr(importlib, 'import_module', import_module)
        return package_problems()


def install(folder, name, version):
    """Install a package without modules."""
    info = folder / f'{name.replace("-", "_")}-{version}.dist-info'
    info.mkdir()
    (info / 'METADATA').write_text(f'Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n')


@pytest.mark.parametrize('packages, errors, fix', [
    ({'mmdet': '2.28.2'}, {}, "'mmdet>=3.3'"),
    ({'mmdet': '3.3.0', 'mmcv-lite': '2.2.0'}, {'mmdet': AssertionError(
        'MMCV==2.2.0 is used but incompatible. Please install mmcv>=2.0.0rc4, <2.2.0.')},
     "'mmdet>=3.3' 'mmcv-lite<2.2'"),
    ({'mmcv': '2.1.0'}, {'mmcv._ext': ImportError(
        'mmcv/_ext.cpython-311-x86_64-linux-gnu.so: undefined symbol: _ZNK2at6Tensor7is_cudaEv')},
     "pip uninstall -y mmcv && pip install 'mmcv-lite<2.2'"),
    ({'mmcv': '2.1.0', 'mmcv-lite': '2.1.0'}, {}, 'pip uninstall -y mmcv mmcv-lite && '),
    ({'mmengine': '0.10.7', 'onedl-mmengine': '0.10.12'}, {}, 'pip install onedl-mmengine'),
    ({'mmengine': '0.10.5', 'torch': '2.5.1+cu121', 'transformers': '4.46.0'}, {},
     "'mmengine>=0.10.6'"),
    ({'mmengine': '0.10.7', 'setuptools': '82.0.0'},
     {'pkg_resources': ModuleNotFoundError("No module named 'pkg_resources'")}, "'setuptools<82'"),
    ({'opencv-python': '5.0.0.93', 'opencv-python-headless': '4.11.0.86'}, {},
     'pip uninstall -y opencv-python opencv-python-headless && pip install opencv-python'),
    ({'opencv-python': '4.11.0.86'}, {'cv2': ImportError(
        'libGL.so.1: cannot open shared object file: No such file or directory')}, 'libgl1'),
    ({'numpy': '2.4.6', 'opencv-python': '4.8.1.78'}, {}, "'opencv-python>=4.10.0.84'"),
    ({'numpy': '2.4.6', 'pycocotools': '2.0.7'}, {'pycocotools._mask': ValueError(SIZE)},
     '--force-reinstall'),
    ({'torch': '2.16.0+cu132'}, {}, "'torch<2.16'"),
])
def test_a_known_problem_is_named_with_its_fix(monkeypatch, packages, errors, fix):
    row, = problems(monkeypatch, packages, errors)
    assert fix in row['command']
    if errors:  # the versions alone are no problem, nor is an import that fails for another reason
        assert not problems(monkeypatch, packages)
        assert not problems(monkeypatch, packages, dict.fromkeys(errors, ImportError('another')))
    for requirement in map(Requirement, row['packages'].split()):  # every package counts
        assert not problems(monkeypatch, {**packages, requirement.name: None}, errors)


@pytest.mark.parametrize('packages', [LOCKED, {
    'torch': '2.0.1+cu117', 'numpy': '1.24.4', 'opencv-python': '4.8.1.78', 'mmengine': '0.10.0',
    'mmcv-lite': '2.1.0', 'mmdet': '3.3.0', 'pycocotools': '2.0.7'}])
def test_what_repeats_is_no_problem(monkeypatch, packages):
    assert not problems(monkeypatch, packages)


def test_every_row_has_a_state_a_source_and_a_command():
    for row in ROWS:
        assert row['state'] in ('broken', 'outdated', 'untried') and None not in row, row
        assert row['problem'] and re.search('pip install|apt-get install', row['command']), row
        assert bool(row['module']) == bool(row['error']) and re.compile(row['error'])
        source = row['source']
        assert source.startswith('https://') or source == 'mmdet/__init__.py' or (
            ROOT / source).is_file()


def test_a_torch_is_untried_if_no_row_of_the_evidence_repeats_with_it():
    page = (ROOT / 'docs' / 'evidence' / 'versions.md').read_text(encoding='utf-8')
    tried = [Version(cells[3].strip()) for cells in (
        line.split('|') for line in page.splitlines() if line.endswith('| equal |'))]
    newest = max(tried).release
    row, = (row for row in ROWS if row['state'] == 'untried')
    wanted = Requirement(row['packages'])
    following = f'{newest[0]}.{newest[1] + 1}'
    assert str(wanted) == f'torch>={following}' and row['command'].endswith(f"'torch<{following}'")


@pytest.mark.usefixtures('provider_stays')
@pytest.mark.parametrize('name, version, code', [
    ('opencv-python-headless', '4.11.0.86', 1), ('torch', '99.0', 0)])
def test_doctor_prints_the_commands(monkeypatch, tmp_path, capsys, name, version, code):
    install(tmp_path, name, version)
    monkeypatch.syspath_prepend(tmp_path)
    row, = package_problems()
    assert exit_code('doctor') == code
    out = capsys.readouterr().out
    assert out.endswith(f'in this order:\n  {row["command"]}\n') and row['source'] in out
    assert exit_code('doctor', '--json') == code
    assert json.loads(capsys.readouterr().out)['problems'] == [row]


@pytest.mark.usefixtures('provider_stays')
def test_doctor_works_where_mmcv_cannot_be_imported(monkeypatch, capsys):
    real = importlib.import_module

    def import_module(name, package=None):
        if name == 'mmcv._ext':
            raise ImportError('libcudart.so.11.0: cannot open shared object file')
        return real(name, package)

    monkeypatch.setattr(importlib, 'import_module', import_module)
    assert exit_code('doctor', '--json') == 0
    said = json.loads(capsys.readouterr().out)
    assert said['operators']['mmcv'] == 'libcudart.so.11.0: cannot open shared object file'
    assert said['verdict'] == 'no known problem of the installed packages'


def test_the_machine_is_described_without_its_name():
    import getpass
    import platform
    facts = machine('cpu')
    assert {'cpu', 'torch', 'python', 'mmdet', 'mmrepro'} <= set(facts)
    words = set(re.split(r'[^\w.-]+', ' '.join(map(str, facts.values()))))
    assert not words & {platform.node(), getpass.getuser()}


def test_the_environment_names_what_changes_bits(monkeypatch):
    monkeypatch.setenv('ATEN_CPU_CAPABILITY', 'avx2')
    found = environment('cpu')
    assert found['machine'] == machine('cpu') and set(found['operators']) == {'mmcv', 'triton'}
    assert found['settings']['env.ATEN_CPU_CAPABILITY'] == 'avx2'
    assert None not in found['settings'].values() and json.dumps(found)


def test_a_fork_is_named_by_the_distribution_that_provides_the_module(monkeypatch):
    installed = dict(mmengine='0.10.7')
    room = sys.modules[machine.__module__]
    monkeypatch.setattr(room, 'installed_version', installed.get)
    monkeypatch.setattr(room, 'version_of',
                        lambda module: 'mmdet-open 3.3.0' if module == 'mmdet' else None)
    found = machine('cpu')
    assert found['mmdet'] == 'mmdet-open 3.3.0'
    assert found['mmengine'] == '0.10.7' and 'mmcv' not in found


CONFIG = 'configs/demo/faster-rcnn_r50_fpn_demo.py'


@pytest.fixture
def a_table_of_two_versions(monkeypatch):
    """Let this CPU be one of the table, whatever it is, and OpenCV 5.0.0 installed."""
    monkeypatch.setattr('mmrepro.facts.collect.cpu_features', lambda: 'sse4_2 avx fma avx2')
    collect._hardware.cache_clear()
    monkeypatch.setattr(cv2, '__version__', '5.0.0')
    yield
    collect._hardware.cache_clear()


@pytest.mark.usefixtures('provider_stays', 'a_table_of_two_versions')
@pytest.mark.parametrize('transform, code', [('Rotate', 1), ('RandomFlip', 0)])
def test_what_an_upgrade_changes_in_a_config(tmp_path, capsys, transform, code):
    config = tmp_path / 'config.py'
    config.write_text(f"_base_ = '{ROOT / CONFIG}'\n"
                      "train_dataloader = dict(dataset=dict(pipeline=[\n"
                      "    dict(type='LoadImageFromFile'), dict(type='LoadAnnotations'),\n"
                      f"    dict(type='{transform}', prob=1.0), dict(type='PackDetInputs')]))\n")
    assert exit_code('doctor', config, '--with', 'opencv-python-headless==4.11.0.86') == code
    said = capsys.readouterr().out
    assert re.search(r'cv2 +5\.0\.0 +4\.11\.0 +', said)
    assert ('other results from Rotate' in said) == bool(code)
    assert ('other versions that change bits: cv2' in said) == bool(code)
    assert exit_code('doctor', config, '--with', 'opencv-python==5.0.0.93') == 0
    assert 'the versions are the same' in capsys.readouterr().out


@pytest.mark.usefixtures('provider_stays', 'a_table_of_two_versions')
def test_the_versions_of_a_run_beside_the_installed_ones(tmp_path, capsys, monkeypatch):
    facts = {'version.scikit-learn': '1.5.2', 'version.cv2': cv2.__version__, 'world_size': 1,
             'version.python': '3.0.0', 'version.PIL': '0.9',
             'hardware.cpu_features': 'sse4_2 avx fma avx2',
             'version.packaging': importlib.metadata.version('packaging')}
    manifest = tmp_path / 'mmrepro' / 'manifest.json'
    manifest.parent.mkdir()
    manifest.write_text(json.dumps(dict(
        kind='manifest', format=1, created='', command=[], cwd='', iteration=0, resumed_from=None,
        config=dict(text="model = dict(type='PAA', bbox_head=dict(type='PAAHead'))", file=None,
                    sha256=''), work_dir='', randomness={}, world_size=1, facts=facts)))
    install(tmp_path, 'scikit-learn', '1.7.2')
    monkeypatch.syspath_prepend(tmp_path)
    assert exit_code('doctor', tmp_path) == 1
    said = capsys.readouterr().out
    for name, version in (('python', '3.0.0'), ('PIL', '0.9')):  # of what is not imported, too
        assert re.search(f' {name} +{version} ', said)
    row, = re.findall(' scikit-learn .*', said)
    assert re.search('1.5.2 +1.7.2 +changes bits +measured: other results from PAAHead', row)
    assert exit_code('doctor', manifest, '--with', 'scikit-learn==1.5.2', 'python==3.0.0',
                     'Pillow==0.9') == 0
    assert 'scikit-learn' not in capsys.readouterr().out


@pytest.mark.usefixtures('provider_stays')
@pytest.mark.parametrize('words, said', [
    ([ROOT / CONFIG, '--with', 'opencv-python'], 'opencv-python: must be PACKAGE==VERSION'),
    ([ROOT / CONFIG, '--with', 'opencv==5.0'], 'no version of opencv is known'),
    (['--with', 'numpy==1.26.4'], '--with needs a run or a config'),
    ([ROOT / CONFIG, '--operators'], 'no meaning with --operators'),
    ([ROOT / 'tests'], 'FingerprintHook writes it')])
def test_wrong_usage_of_an_upgrade_is_one_line(capsys, words, said):
    assert exit_code('doctor', *words) == 2
    assert said in capsys.readouterr().err


def test_a_stand_in_is_a_version_of_what_it_stands_in_for():
    """Facts name it, and so does the table of what was measured."""
    from mmrepro.verbs.doctor import _version_of
    known = {'version.albumentations': '2.0.8', 'version.pycocotools': '2.0.11'}
    for text, found in (
            ('albumentationsx==2.0.20', ('version.albumentations', 'albumentationsx 2.0.20')),
            ('faster-coco-eval==1.8.0', ('version.pycocotools', 'faster-coco-eval 1.8.0')),
            ('pycocotools==2.0.10', ('version.pycocotools', '2.0.10'))):
        assert _version_of(text, known) == found
