"""What `pip install .` puts on the disk, where MIM, MMEngine and the shell find it; action.yml."""
import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
import zipfile

import pytest
import tomllib
import yaml
from harness import ROOT, python

import mmrepro
from mmrepro import version

SOURCES = ('LICENSE', 'MANIFEST.in', 'README.md', '_mmrepro_operators.py', '_mmrepro_pytest.py',
           'configs', 'docs', 'mmrepro', 'model-index.yml', 'pyproject.toml', 'requirements',
           'setup.cfg', 'setup.py', 'tools')


def _project():
    return tomllib.loads((ROOT / 'pyproject.toml').read_text(encoding='utf-8'))['project']


def _pins(name):
    lines = (ROOT / 'requirements' / name).read_text(encoding='utf-8').splitlines()
    return [line.strip() for line in lines if line.strip() and not line.startswith('#')]


def _copy_sources(folder):
    copy = folder / 'mmrepro-source'
    copy.mkdir()
    ignore = shutil.ignore_patterns('__pycache__', '.mim', '*.egg-info')
    for name in SOURCES:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, copy / name, ignore=ignore)
        else:
            shutil.copy(source, copy / name)
    return copy


@pytest.fixture(scope='module')
def wheel(tmp_path_factory):
    """Names and contents of a wheel, built from a copy so that the checkout stays as it is."""
    copy = _copy_sources(tmp_path_factory.mktemp('source'))
    out = tmp_path_factory.mktemp('wheel')
    subprocess.run([sys.executable, '-m', 'pip', 'wheel', '--quiet', '--no-deps', '--no-index',
                    '--no-build-isolation', '--wheel-dir', str(out), str(copy)], check=True)
    (path, ) = out.iterdir()
    with zipfile.ZipFile(path) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def _unpack(wheel, folder):
    for name, content in wheel.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)


def _files(folder, suffixes):
    return [path.relative_to(ROOT).as_posix() for path in (ROOT / folder).rglob('*')
            if path.suffix in suffixes]


def _content(path):
    return (ROOT / path).read_bytes()


def test_every_module_is_in_the_wheel(wheel):
    modules = [p for p in _files('mmrepro', ['.py']) if '/configs/' not in p and '/.mim/' not in p]
    assert modules and not [path for path in modules if path not in wheel]


def test_configs_tools_and_data_files_are_in_the_wheel(wheel):
    """The mixins also where lazy configs read them."""
    for path in [*_files('configs', ['.py', '.yml']), 'tools/train.py', 'tools/test.py',
                 'tools/dist_train.sh', 'tools/slurm_train.sh', 'model-index.yml']:
        assert wheel[f'mmrepro/.mim/{path}'] == _content(path)
    for name in ('reproducible', 'seeded'):
        assert wheel[f'mmrepro/configs/_base_/{name}.py'] == _content(f'configs/_base_/{name}.py')
    data = [path for path in _files('mmrepro', ['.json', '.ini', '.csv', '.css'])
            if '/.mim/' not in path]
    assert 'mmrepro/ops/portable/known_answers.json' in data
    for path in data:
        assert wheel[path] == _content(path)


def test_nothing_else_is_in_the_wheel(wheel):
    allowed = re.compile(r'mmrepro/(.*\.(py|yml|sh|json|ini|csv|css|js|html)|py\.typed)$'
                         r'|mmrepro/\.mim/docs/.*\.md$'
                         r'|mmrepro-[^/]*\.dist-info/|_mmrepro_(operators|pytest)\.py$|mmrepro\.pth$')
    assert [name for name in wheel if not allowed.match(name)] == []
    left_out = ('tools/gpu_check.py', *(
        f'tools/{name}.sh' for name in ('demo', 'test', 'test_hosts', 'docs', 'environment',
                                        'gpu_report', 'gpu_atomics', 'build_mmcv', 'try_wheel')))
    assert [name for name in wheel if name.endswith(left_out)] == []


def test_metadata(wheel):
    (text, ) = (v.decode() for k, v in wheel.items() if k.endswith('.dist-info/METADATA'))
    assert f'\nVersion: {mmrepro.__version__}\n' in text
    required = re.findall(r'^Requires-Dist: ([\w-]+)(?!.*extra)', text, re.M)
    assert sorted(required) == ['mmengine', 'numpy', 'rich', 'setuptools', 'torch']
    (scripts, ) = (v.decode() for k, v in wheel.items() if k.endswith('entry_points.txt'))
    assert 'mmrepro = mmrepro.cli:main' in scripts
    assert '[pytest11]\nmmrepro = _mmrepro_pytest' in scripts


def test_an_installed_package_finds_its_own_configs_and_tools(wheel, tmp_path):
    _unpack(wheel, tmp_path / 'site')
    lazy = tmp_path / 'lazy.py'
    lazy.write_text('from mmengine.config import read_base\nwith read_base():\n'
                    '    from mmrepro.configs._base_.reproducible import *\n')
    code = ('from mmengine.config import Config\n'
            'from mmrepro.demo.dataset import demo_config, shipped\n'
            'print(shipped("tools/train.py")); print(demo_config("yolox_s").filename)\n'
            'from mmrepro.audit.rules import RULES; import os\n'
            'print({os.path.isfile(rule.link.split()[0]) for rule in RULES})\n'
            f'print(Config.fromfile({str(lazy)!r}).randomness)\n')
    installed = dict(cwd=tmp_path, PYTHONPATH=str(tmp_path / 'site'))
    tool, config, pages, randomness = python('-c', code, **installed).splitlines()[-4:]
    assert pages == '{True}'
    mim = os.path.join(str(tmp_path), 'site', 'mmrepro', '.mim')
    assert tool == os.path.join(mim, 'tools', 'train.py')
    assert config == os.path.join(mim, 'configs', 'demo', 'yolox_s_demo.py')
    assert "'deterministic': True" in randomness
    python(tool, '--help', **installed)


PLUGIN = """
import sys, torch
from mmengine.runner import Runner
from mmcv.ops import roi_align
from mmdet.models import RetinaNet

def pool():
    return roi_align(torch.ones(1, 1, 8, 8), torch.tensor([[0., 0, 0, 4, 4]]), 2).sum().item()

assert 'mmrepro' not in sys.modules and pool() == 4
assert Runner.from_cfg.__func__.__module__ == 'mmengine.runner.runner'
"""


@pytest.mark.parametrize('order', [['plugin', 'mmrepro'], ['mmrepro', 'plugin']])
def test_custom_imports_may_name_an_installed_mmrepro_in_any_order(wheel, tmp_path, order):
    """A plugin uses mmcv's operators before mmrepro is imported; that activates nothing."""
    site = tmp_path / 'site'
    _unpack(wheel, site)
    plugin = PLUGIN if order[0] == 'plugin' else PLUGIN.partition('assert')[0]
    (tmp_path / 'plugin.py').write_text(plugin)
    (tmp_path / 'config.py').write_text(f'custom_imports = dict(imports={order})\n')
    code = (f'import site; site.addsitedir({str(site)!r}); import sys\n'
            'assert not {"mmrepro", "torch"} & {*sys.modules}\n'
            'from mmengine.config import Config; Config.fromfile("config.py")\n'
            'import mmcv, mmrepro, plugin; from mmengine.runner import Runner\n'
            'operator = mmcv._ext.roi_align_forward\n'
            'print(Runner.from_cfg.__func__.__module__, type(mmcv._ext).__module__, plugin.pool(),'
            ' operator.__module__)\n'
            'mmrepro.deactivate(); print("mmcv._ext" in sys.modules)')
    said = python('-c', code, cwd=tmp_path, PYTHONPATH=f'{site}{os.pathsep}{tmp_path}')
    provider = 'mmrepro.ops.provider'
    assert said.split() == ['mmrepro.activation', provider, '4.0', provider, 'False']


def test_an_editable_installation_links_to_the_checkout(tmp_path):
    copy = _copy_sources(tmp_path)
    subprocess.run([sys.executable, '-m', 'pip', 'install', '--quiet', '--no-deps', '--no-index',
                    '--no-build-isolation', '--target', str(tmp_path / 'site'), '--editable',
                    str(copy)], check=True)
    mim = copy / 'mmrepro' / '.mim'
    assert (mim / 'configs').resolve() == copy / 'configs'
    assert (mim / 'tools' / 'train.py').resolve() == copy / 'tools' / 'train.py'
    assert (mim / '.gitignore').read_text() == '*\n'


@pytest.mark.parametrize('name', [
    'lock.txt', 'tests.txt', 'triton.txt', 'docs.txt', 'notebook.txt'])
def test_locked_versions_are_exact(name):
    for line in _pins(name):
        assert re.fullmatch(r'[A-Za-z0-9_.-]+==[0-9][0-9A-Za-z.]*', line), line


def test_the_lock_compiles_nothing_leaves_torchvision_out_and_satisfies_the_package():
    names = {line.split('==')[0] for line in _pins('lock.txt')}
    assert {'mmcv-lite', 'mmdet', 'mmengine', 'torch'} <= names
    assert not names & {'mmcv', 'mmcv-full', 'torchvision'}
    versions = dict(line.split('==') for name in ('lock.txt', 'tests.txt', 'triton.txt', 'docs.txt')
                    for line in _pins(name))
    from packaging.requirements import Requirement
    for line in sum(_project()['optional-dependencies'].values(), _project()['dependencies']):
        requirement = Requirement(line)
        assert versions[requirement.name] in requirement.specifier, line


def test_ci_and_tools_are_executable_and_parse():
    scripts = ['.ci/run', *_files('tools', ['.sh'])]
    for path in scripts:
        subprocess.run(['bash', '-n', ROOT / path], check=True)
        assert os.access(ROOT / path, os.X_OK) or path.endswith('environment.sh')


def test_durations_are_of_modules_that_exist():
    """A module that was renamed is timed again: tools/test.sh PATH --write-durations."""
    durations = json.loads((ROOT / 'tests' / 'durations.json').read_text())
    assert [name for name in durations if not (ROOT / 'tests' / name).exists()] == []


def test_an_unsupported_python_is_refused_with_the_fix(tmp_path):
    fake = tmp_path / 'python'
    fake.write_text('#!/usr/bin/env bash\n[ "$1" = --version ] && echo "Python 3.8.1"\nexit 1\n')
    fake.chmod(0o755)
    result = subprocess.run(
        ['bash', ROOT / 'tools' / 'demo.sh'], capture_output=True, text=True,
        env={**os.environ, 'PYTHON': str(fake), 'VENV': str(tmp_path / 'venv'),
             'ENVIRONMENT_IS_MADE': ''})
    assert result.returncode != 0 and not (tmp_path / 'venv').exists()
    assert 'Python 3.11 to 3.13' in result.stderr and 'Python 3.8.1' in result.stderr


def test_what_the_package_refuses_is_what_pip_refuses():
    wanted = {re.split('[>=<]', line)[0]: line for line in
              _project()['dependencies'] if '>=' in line}
    assert {name: f'{name}>={".".join(map(str, release))}'
            for name, release in version.REQUIRED.items()} == wanted


@pytest.mark.parametrize('name, old', [('torch', '1.13.1+cu117'), ('numpy', '1.23.5'),
                                       ('mmengine', '0.9.1')])
def test_other_versions_are_refused_at_the_import(name, old):
    def installed(asked):
        if asked == 'mmengine' and name != 'mmengine':
            raise importlib.metadata.PackageNotFoundError(asked)  # a fork of another name
        return old if asked == name else '99.0'

    with pytest.raises(ImportError, match=f'mmrepro needs {name} .* {re.escape(old)} is installed'):
        version.check_versions(installed)
    version.check_versions(lambda asked: '99.1rc1')


ACTION = yaml.safe_load((ROOT / 'action.yml').read_text(encoding='utf-8'))


def test_every_input_is_described_and_reaches_the_script():
    step, = ACTION['runs']['steps']
    assert ACTION['runs']['using'] == 'composite' and step['shell'] == 'bash'
    for name, given in ACTION['inputs'].items():
        assert given['description'] and 'default' in given
        assert f'inputs.{name} ' in str(step['env']) + step['working-directory']
    assert '${{' not in step['run']  # an input that is part of the script could run anything
    page = (ROOT / 'docs' / 'how-to' / 'golden.md').read_text(encoding='utf-8')
    assert all(f'| `{name}` |' in page for name in ACTION['inputs'])


@pytest.mark.parametrize('code, said, outcome', [
    (0, 'EQUAL: a', 'equal'), (1, 'DIFFERENT after 2', 'different'), (2, '', 'error'),
    (3, 'NO GOLDEN for this machine', 'missing'), (0, 'NO GOLDEN for this machine', 'missing')])
def test_the_outcome(tmp_path, code, said, outcome):
    fake = tmp_path / 'mmrepro'
    fake.write_text(f'#!/bin/sh\necho "$@" > {tmp_path}/arguments\necho "{said}"\nexit {code}\n')
    fake.chmod(0o755)
    env = dict(os.environ, PATH=f'{tmp_path}:{os.environ["PATH"]}', GOLDENS='a folder',
               CONFIGS='one.py two.py', MISSING='pass', RUNNER_TEMP=str(tmp_path),
               GITHUB_OUTPUT=str(tmp_path / 'out'), GITHUB_STEP_SUMMARY=str(tmp_path / 'summary'))
    done = subprocess.run(['bash', '-eo', 'pipefail', '-c', ACTION['runs']['steps'][0]['run']],
                          env=env, capture_output=True, text=True)
    assert done.returncode == code, done.stderr
    assert (tmp_path / 'arguments').read_text() == (
        'golden check one.py two.py --goldens a folder --missing pass\n')
    assert (tmp_path / 'out').read_text() == f'outcome={outcome}\n'
    assert said in (tmp_path / 'summary').read_text()
