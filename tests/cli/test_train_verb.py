"""The command lines of ``train`` and ``test``."""
import os
import re
from pathlib import Path

import pytest
import torch
from command import exit_code

from mmrepro.cli import arguments, test, train
from mmrepro.runs import startup

# a config that any argument can be merged into; nothing is built from it
CONFIG = """
randomness = dict(seed=1)
optim_wrapper = dict(type='OptimWrapper', optimizer=dict(type='SGD', lr=0.1))
auto_scale_lr = dict(enable=False, base_batch_size=16)
test_dataloader = dict(dataset=dict(type='Wrapper', dataset=dict(
    pipeline=[dict(type='LoadImageFromFile'), dict(type='PackDetInputs')]), pipeline=[]))
model = dict(type='Detector')
"""


class Runner:
    def __init__(self, cfg):
        self.cfg, self.done = cfg, []

    def train(self):
        self.done.append('train')

    def test(self):
        self.done.append('test')


@pytest.fixture
def config(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ('a.pth', 'weights.pth'):
        (tmp_path / name).touch()
    path = tmp_path / 'my_config.py'
    path.write_text(CONFIG)
    return str(path)


@pytest.fixture
def built(monkeypatch):
    """Record what the verbs build, without building a detector or starting again."""
    runners = []
    monkeypatch.setattr(arguments, 'build_runner',
                        lambda cfg: runners.append(Runner(cfg)) or runners[-1])
    monkeypatch.setattr(arguments, 'restart_for', lambda cfg: None)
    monkeypatch.setenv('LOCAL_RANK', '0')
    return runners


def test_train_takes_every_argument_of_mmdetections_script(config, built, tmp_path):
    train.main([
        config, '--work-dir', str(tmp_path / 'w'), '--amp', '--auto-scale-lr', '--resume', 'a.pth',
        '--launcher', 'none', '--local_rank', '0', '--cfg-options',
        'optim_wrapper.optimizer.lr=0.5', 'randomness.numerics.num_threads=2'
    ])
    cfg = built[0].cfg
    assert built[0].done == ['train']
    assert cfg.work_dir == str(tmp_path / 'w')
    assert cfg.optim_wrapper.type == 'AmpOptimWrapper'
    assert cfg.optim_wrapper.loss_scale == 'dynamic'
    assert cfg.auto_scale_lr.enable is True
    assert (cfg.resume, cfg.load_from) == (True, 'a.pth')
    assert cfg.optim_wrapper.optimizer.lr == 0.5
    assert cfg.randomness == dict(seed=1, numerics=dict(num_threads=2))


def test_arguments_are_those_of_the_installed_mmdetection(capsys):
    import mmdet
    for verb in ('train', 'test'):
        script = Path(mmdet.__file__).parent / '.mim' / 'tools' / f'{verb}.py'
        theirs = set(re.findall("'(--[^']*)", script.read_text(encoding='utf-8')))
        assert exit_code(verb, '--help') == 0
        ours = capsys.readouterr().out
        # hidden from the help: the launcher gives it, not a person
        assert {t for t in theirs if t not in ours} == {'--local_rank', '--local-rank'}


@pytest.mark.parametrize('given, expected', [
    ([], dict(seed=1)),
    (['--seed', '5'], dict(seed=5)),
    (['--deterministic'], dict(seed=1, deterministic=True)),
    (['--deterministic', 'warn'], dict(seed=1, deterministic='warn')),
    (['--deterministic', 'false'], dict(seed=1, deterministic=False)),
    (['--diff-rank-seed'], dict(seed=1, diff_rank_seed=True)),
    (['--seed', '5', '--cfg-options', 'randomness.seed=5'], dict(seed=5)),
    (['--seed', '3', '--cfg-options', 'randomness=None'], dict(seed=3)),
])
def test_reproducibility_arguments_become_keys_of_randomness(config, built, given, expected):
    train.main([config, *given])
    assert built[0].cfg.randomness == expected


@pytest.mark.parametrize('verb, given, message', [
    ('train', ['--seed', '5', '--cfg-options', 'randomness.seed=6'],
     '--seed says 5 and --cfg-options'),
    ('train', ['--deterministic', 'maybe'], "'maybe' is not allowed; allowed: warn, true, false"),
    ('train', ['--seed', 'x'], 'invalid int value'),
    ('train', ['--resume', 'no.pth'], 'no.pth: no such checkpoint'),
    ('train', ['--auto-scale-lr', '--cfg-options', 'auto_scale_lr._delete_=True'],
     'mmrepro train: --auto-scale-lr needs auto_scale_lr = dict(base_batch_size=...)'),
    ('train', ['--work-dir', 's3://bucket/run'],
     'work_dir s3://bucket/run: must be a folder of this machine'),
    ('test', ['no.pth'], 'no.pth: no such checkpoint'),
    ('test', ['weights.pth', '--out', 'result.json'], 'name must end in .pkl or .pickle'),
])
def test_wrong_usage_is_refused_before_anything_is_built(config, built, capsys, verb, given,
                                                         message):
    assert exit_code(verb, config, *given) == 2
    assert message in capsys.readouterr().err and built == []


@pytest.mark.parametrize('size, option, code', [
    ('2', (), 2), ('2', ('--launcher', 'pytorch'), 0), ('1', (), 0)])
def test_processes_of_torchrun_without_a_launcher_are_refused(
        size, option, code, config, built, capsys, monkeypatch):
    monkeypatch.setenv('TORCHELASTIC_RUN_ID', 'none')
    monkeypatch.setenv('WORLD_SIZE', size)
    assert exit_code('train', config, *option) == code
    assert ('give --launcher pytorch' in capsys.readouterr().err) == (code == 2)


def test_resume_without_a_value_takes_the_latest(config, built):
    train.main([config, '--resume'])
    assert built[0].cfg.resume == 'auto' and 'load_from' not in built[0].cfg
    assert built[0].cfg.work_dir == os.path.join('./work_dirs', 'my_config')


def test_test_loads_the_checkpoint_and_augments(config, built):
    with pytest.warns(UserWarning, match='no tta_'):
        test.main([config, 'weights.pth', '--tta'])
    cfg = built[0].cfg
    assert built[0].done == ['test'] and cfg.load_from == 'weights.pth'
    assert cfg.model.type == 'DetTTAModel' and cfg.model.module.type == 'Detector'
    steps = cfg.test_dataloader.dataset.pipeline
    assert [step.type for step in steps] == ['LoadImageFromFile', 'TestTimeAug']
    assert [flip.prob for flip in steps[1].transforms[0]] == [1.0, 0.0]


@pytest.mark.parametrize('lines, mode, num_threads, cpu', [
    ('', False, None, None),
    ('randomness.update(deterministic=True)', True, None, None),
    ('randomness.update(deterministic="warn", numerics=dict(num_threads=2))', 'warn', 2, None),
    ('deterministic = True', True, None, None),
    ('randomness.update(deterministic=True, numerics=dict(cpu="avx2"))', True, None, 'avx2'),
])
def test_the_config_decides_what_must_be_set(config, monkeypatch, lines, mode, num_threads, cpu):
    asked = []
    monkeypatch.setattr(arguments, 'build_runner', Runner)
    monkeypatch.setattr(startup, 'restart_if_incomplete', lambda *args: asked.append(args))
    with open(config, 'a', encoding='utf-8') as file:
        file.write(f'{lines}\n')
    train.main([config])
    assert asked == [(os.environ, mode, num_threads, cpu)]


TOY = """
_base_ = '{base}'
randomness = dict(_delete_=True, seed=0)
"""


@pytest.mark.parametrize('changes, says', [
    # other tests may have registered a name like it
    ('model.type=NoHead', 'NoHead is not in the mmengine::model registry; .* import the module '
     'that registers it: custom_imports'),
    ('optim_wrapper.type=AmpOptimWrapper',
     'is only available training on gpu, .*; there is none here: train without --amp')])
def test_a_config_that_does_not_fit_is_one_line(changes, says, tmp_path, capsys):
    if 'Amp' in changes and torch.cuda.is_available():
        pytest.skip('there is a GPU')
    path = tmp_path / 'toy.py'
    path.write_text(TOY.format(base=Path(__file__).parents[1] / 'support' / 'toy_config.py'))
    assert exit_code('train', path, '--work-dir', tmp_path / 'w', '--cfg-options', changes) == 2
    assert re.search(f'mmrepro train: .*{says}', capsys.readouterr().err)
