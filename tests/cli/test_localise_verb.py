"""``mmrepro localise``: usage, settings of run A and run B, and the whole in fresh processes."""
import json

import pytest
from command import exit_code
from faults.tiny import tiny
from harness import fresh
from mmengine.config import Config

from mmrepro import cli
from mmrepro.errors import ConfigError
from mmrepro.localise.search import Localiser


@pytest.mark.parametrize('arguments, message', [
    (['no/such.py'], 'no such config'),
    (['CONFIG', '--b', 'nonsense'], 'must be KEY=VALUE'),
    (['CONFIG', '--iters', '0'], '--iters 0: must be 1 or more'),
    (['CONFIG', '--resume-b', '0'], '--resume-b 0: must be 1 or more'),
    (['CONFIG', '--validate-b', '0'], '--validate-b 0: must be 1 or more'),
    (['CONFIG', '--validate-b', '3'], 'has no val_cfg'),
    (['CONFIG', '--resume-b', '30'], '--resume-b 30 --iters 20: 0 < K < N is needed'),
    (['CONFIG', '--validate-b', '2', '--iters', '2'], '--validate-b 2 --iters 2: 0 < K < N'),
    *((['no/run', 'no/other', f'--{name}', value], f'--{name} is for a CONFIG') for name, value in (
        ('a', 'x=1'), ('b', 'x=1'), ('resume-b', '3'), ('validate-b', '3'), ('ranks', '2'),
        ('cfg-options', 'x=1'), ('iters', '3'))),
    (['IMPORTS'], "No module named 'no_such_module_of_mine'"),
    (['no/run', 'no/other'], 'no/run: no such run'),
])
def test_wrong_usage_is_explained(arguments, message, tmp_path, capsys):
    path = str(tmp_path / 'config.py')
    tiny(tmp_path).dump(path)
    imports = tmp_path / 'imports.py'
    imports.write_text("custom_imports = dict(imports=['no_such_module_of_mine'])\n")
    files = dict(CONFIG=path, IMPORTS=str(imports))
    arguments = [files.get(text, text) for text in arguments]
    assert exit_code('localise', *arguments, '--work-dir', tmp_path / 'out') == 2
    assert message in capsys.readouterr().err


def test_settings_and_variables_are_told_apart(tmp_path, monkeypatch):
    path = str(tmp_path / 'config.py')
    tiny(tmp_path).dump(path)
    seen = []

    def search(self, iterations, values):
        seen.extend(self.specs)
        raise ConfigError('enough')

    monkeypatch.setattr(Localiser, 'search', search)
    assert cli.main(['localise', path, '--work-dir', str(tmp_path / 'out'), '--b',
                     'OMP_NUM_THREADS=2', 'train_dataloader.num_workers=4', '--resume-b', '3',
                     '--ranks', '2']) == 2
    a, b = seen
    assert a.env == {} and b.env == dict(OMP_NUM_THREADS='2')
    assert b.asked == {**b.env, 'train_dataloader.num_workers': 4} and a.asked == {}
    assert (a.resume_at, b.resume_at, a.ranks, b.ranks) == (None, 3, 2, 2)
    assert Config.fromfile(a.config).train_dataloader.num_workers == 0
    assert Config.fromfile(b.config).train_dataloader.num_workers == 4


@pytest.mark.nightly
def test_from_a_config_and_from_two_runs_in_fresh_processes(tmp_path):
    cfg = tiny(tmp_path / 'work')
    cfg.custom_imports = dict(imports=['mmrepro', 'faults.tiny'], allow_failed_imports=False)
    cfg.default_hooks.checkpoint = dict(type='CheckpointHook', interval=1, by_epoch=False)
    path = str(tmp_path / 'config.py')
    cfg.dump(path)

    def run(*arguments):
        done = fresh('-m', 'mmrepro', 'localise', *arguments, code=None, cwd=tmp_path)
        return done.returncode, done.stdout, done.stderr

    code, out, err = run(path, '--iters', '5', '--work-dir', 'same')
    assert code == 0 and 'SAME BITS: 5 iterations compared' in out, out + err
    code, out, err = run(path, '--iters', '5', '--json', '--work-dir', 'other',
                         '--b', 'param_scheduler.gamma=0.25')
    result = json.loads(out)
    assert code == 1 and result['finding']['cause'] == 'another setting', out + err
    code, out, err = run('other/A/fingerprints', 'other/B/fingerprints', '--work-dir', 'runs')
    assert code == 1 and 'StepLR 0 gamma=0.5 / 0.25' in out, out + err
    assert 'continues from' in err
