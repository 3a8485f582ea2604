"""The command line: arguments, the single restart, the doors under tools/."""
from __future__ import annotations

import os
import pickle
import subprocess
import sys

import pytest
from mmengine.config import Config

from mmrepro import cli
from mmrepro.runs import start

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
TOOLS = os.path.join(ROOT, 'tools')

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
    """Stands for a runner: remembers the config that it was built from."""

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
    """What train() and test() build, without building a detector or starting again."""
    runners = []
    monkeypatch.setattr(start, '_runner',
                        lambda cfg, parser: runners.append(Runner(cfg)) or runners[-1])
    monkeypatch.setattr(start, 'restart_if_incomplete', lambda *_: None)
    monkeypatch.setenv('LOCAL_RANK', '0')
    return runners


def test_train_takes_every_argument_of_mmdetections_script(config, built, tmp_path):
    start.train([
        config, '--work-dir', str(tmp_path / 'w'), '--amp', '--auto-scale-lr', '--resume', 'a.pth',
        '--launcher', 'none', '--local_rank', '0', '--cfg-options',
        'optim_wrapper.optimizer.lr=0.5', 'randomness.num_threads=2'
    ])
    cfg = built[0].cfg
    assert built[0].done == ['train']
    assert cfg.work_dir == str(tmp_path / 'w')
    assert cfg.optim_wrapper.type == 'AmpOptimWrapper'
    assert cfg.optim_wrapper.loss_scale == 'dynamic'
    assert cfg.auto_scale_lr.enable is True
    assert (cfg.resume, cfg.load_from) == (True, 'a.pth')
    assert cfg.optim_wrapper.optimizer.lr == 0.5
    assert cfg.randomness == dict(seed=1, num_threads=2)


def test_arguments_are_those_of_the_installed_mmdetection():
    import mmdet
    for verb in ('train', 'test'):
        path = os.path.join(os.path.dirname(mmdet.__file__), '.mim', 'tools', f'{verb}.py')
        with open(path, encoding='utf-8') as file:
            words = file.read().replace('(', ' ').replace(',', ' ').split()
        theirs = {word.strip("'") for word in words if word.startswith("'--")}
        ours = subprocess.run([sys.executable, os.path.join(TOOLS, f'{verb}.py'), '--help'],
                              capture_output=True, text=True, check=True).stdout
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
])
def test_reproducibility_arguments_become_keys_of_randomness(config, built, given, expected):
    start.train([config, *given])
    assert built[0].cfg.randomness == expected


def test_without_a_randomness_dict_the_arguments_make_one(config, built):
    with open(config, 'a', encoding='utf-8') as file:
        file.write('randomness = None\n')
    start.train([config, '--seed', '3'])
    assert built[0].cfg.randomness == dict(seed=3)


@pytest.mark.parametrize('given, message', [
    (['--seed', '5', '--cfg-options', 'randomness.seed=6'], "--seed says 5 and --cfg-options"),
    (['--deterministic', 'maybe'], "'maybe' is not allowed; allowed: warn, true, false"),
    (['--seed', 'x'], 'invalid int value'),
])
def test_contradictions_are_refused(config, built, capsys, given, message):
    with pytest.raises(SystemExit) as error:
        start.train([config, *given])
    assert error.value.code == 2
    assert message in capsys.readouterr().err
    assert built == []


def test_a_missing_config_is_named(built, capsys):
    with pytest.raises(SystemExit):
        start.train(['no/such.py'])
    assert 'no/such.py: no such config' in capsys.readouterr().err


@pytest.mark.parametrize('verb, arguments', [('train', ['--resume', 'no.pth']),
                                             ('test', ['no.pth'])])
def test_a_missing_checkpoint_is_named(config, built, capsys, verb, arguments):
    with pytest.raises(SystemExit):
        getattr(start, verb)([config, *arguments])
    assert 'no.pth: no such checkpoint' in capsys.readouterr().err
    assert built == []


def test_a_setting_that_is_refused_is_named_without_a_traceback(config, monkeypatch, capsys):
    monkeypatch.setattr(start, 'restart_if_incomplete', lambda *_: None)
    with pytest.raises(SystemExit) as error:
        start.train([config, '--cfg-options', 'randomness.sede=3'])
    assert error.value.code == 2
    assert "unknown key 'sede' (value 3); did you mean 'seed'?" in capsys.readouterr().err


def test_resume_without_a_value_takes_the_latest(config, built):
    start.train([config, '--resume'])
    assert built[0].cfg.resume is True and built[0].cfg.load_from is None
    assert built[0].cfg.work_dir == os.path.join('./work_dirs', 'my_config')


def test_auto_scale_lr_needs_a_batch_size(config, built):
    with open(config, 'a', encoding='utf-8') as file:
        file.write('auto_scale_lr = dict(enable=False)\n')
    with pytest.raises(KeyError, match='base_batch_size'):
        start.train([config, '--auto-scale-lr'])


def test_test_loads_the_checkpoint_and_augments(config, built):
    with pytest.warns(UserWarning, match='no tta_'):
        start.test([config, 'weights.pth', '--tta'])
    cfg = built[0].cfg
    assert built[0].done == ['test'] and cfg.load_from == 'weights.pth'
    assert cfg.model.type == 'DetTTAModel' and cfg.model.module.type == 'Detector'
    steps = cfg.test_dataloader.dataset.pipeline
    assert [step.type for step in steps] == ['LoadImageFromFile', 'TestTimeAug']
    assert [flip.prob for flip in steps[1].transforms[0]] == [1.0, 0.0]


def test_out_must_be_a_pickle_file(config, built, capsys):
    with pytest.raises(SystemExit):
        start.test([config, 'weights.pth', '--out', 'result.json'])
    assert '--out result.json: the name must end in .pkl or .pickle' in capsys.readouterr().err


class Restarted(Exception):
    pass


@pytest.fixture
def restarts(monkeypatch):
    """Environments that the process would be started again with."""
    seen = []

    def execute(env):
        seen.append(env)
        raise Restarted

    monkeypatch.setattr(start, '_execute', execute)
    return seen


COMPLETE = dict(PYTHONHASHSEED='0', CUBLAS_WORKSPACE_CONFIG=':4096:8', OMP_NUM_THREADS='1',
                MKL_NUM_THREADS='1')


def test_a_complete_environment_does_not_restart(restarts):
    start.restart_if_incomplete(COMPLETE)
    assert restarts == []


def test_a_missing_variable_restarts_once_with_everything_else_kept(restarts, capsys):
    env = dict(COMPLETE, OTHER='kept')
    del env['PYTHONHASHSEED']
    with pytest.raises(Restarted):
        start.restart_if_incomplete(env)
    assert restarts[0][start.RESTARTED] == '1' and restarts[0]['OTHER'] == 'kept'
    assert 'PYTHONHASHSEED' in restarts[0]
    assert 'starting again with PYTHONHASHSEED=' in capsys.readouterr().err
    start.restart_if_incomplete(restarts[0])
    assert len(restarts) == 1


def test_a_variable_that_is_lost_is_an_error_not_a_loop(restarts):
    env = dict(COMPLETE, **{start.RESTARTED: '1'})
    del env['PYTHONHASHSEED']
    with pytest.raises(RuntimeError, match='PYTHONHASHSEED.* did not survive a restart'):
        start.restart_if_incomplete(env)
    assert restarts == []


def test_every_rank_decides_alike_and_one_says_so(restarts, capsys):
    for rank in '01':
        with pytest.raises(Restarted):
            start.restart_if_incomplete(dict(RANK=rank, LOCAL_RANK=rank))
    first, second = restarts
    assert {k: v for k, v in first.items() if 'RANK' not in k} == \
        {k: v for k, v in second.items() if 'RANK' not in k}
    assert capsys.readouterr().err.count('starting again') == 1


SCRIPT = """
import os, sys
sys.path.insert(0, {root!r})
from mmrepro.runs import start
print('pid', os.getpid(), 'hash', os.environ.get('PYTHONHASHSEED'), sys.argv[1:],
      sys.flags.utf8_mode, flush=True)
start.restart_if_incomplete(os.environ)
"""


def test_a_real_restart_keeps_the_process_and_its_arguments(tmp_path):
    script = tmp_path / 'script.py'
    script.write_text(SCRIPT.format(root=ROOT))
    env = {k: v for k, v in os.environ.items() if k not in ('PYTHONHASHSEED', start.RESTARTED)}
    result = subprocess.run([sys.executable, '-X', 'utf8', str(script), 'a b', '--c'], env=env,
                            capture_output=True, text=True, check=True)
    first, second = result.stdout.splitlines()
    pid = first.split()[1]
    assert first.startswith(f'pid {pid} hash None') and second.startswith(f'pid {pid} hash 0')
    assert first.split('[')[1] == second.split('[')[1] == "'a b', '--c'] 1"


@pytest.mark.parametrize('lines, mode, num_threads', [
    ('', False, None),
    ('randomness.update(deterministic=True)', True, None),
    ('randomness.update(deterministic="warn", num_threads=2)', 'warn', 2),
    ('deterministic = True', True, None),
])
def test_the_config_decides_what_must_be_set(config, monkeypatch, lines, mode, num_threads):
    asked = []
    monkeypatch.setattr(start, '_runner', lambda cfg, parser: Runner(cfg))
    monkeypatch.setattr(start, 'restart_if_incomplete', lambda *args: asked.append(args))
    with open(config, 'a', encoding='utf-8') as file:
        file.write(f'{lines}\n')
    start.train([config])
    assert asked == [(os.environ, mode, num_threads)]


def test_a_run_that_is_not_deterministic_does_not_start_again(restarts):
    start.restart_if_incomplete({}, mode=False)
    assert restarts == []


def test_verbs_are_listed_and_unknown_ones_refused(capsys):
    assert cli.main(['--help']) == 0
    out = capsys.readouterr().out
    assert all(verb in out for verb in cli.VERBS)
    assert cli.main(['trian']) == 2
    assert capsys.readouterr().err == (
        "mmrepro: unknown verb 'trian'; did you mean 'train'? (see mmrepro --help)\n")
    assert cli.main(['nothing-like-it']) == 2
    assert 'verbs: demo, data, train' in capsys.readouterr().err
    assert cli.main([]) == 2
    assert 'usage: mmrepro VERB' in capsys.readouterr().err


def test_a_verb_may_be_written_with_a_hyphen(capsys):
    with pytest.raises(SystemExit) as error:
        cli.main(['gpu-check', '--help'])
    assert error.value.code == 0 and 'mmrepro gpu_check' in capsys.readouterr().out


def test_the_package_can_be_run():
    done = subprocess.run([sys.executable, '-W', 'ignore', '-m', 'mmrepro', '--help'],
                          capture_output=True, text=True, cwd=ROOT, check=True)
    assert 'usage: mmrepro VERB' in done.stdout


@pytest.mark.parametrize('verb', cli.VERBS)
def test_every_verb_has_help_with_an_example(verb, capsys):
    with pytest.raises(SystemExit) as error:
        cli.main([verb, '--help'])
    out = capsys.readouterr().out
    assert error.value.code == 0 and f'example:\n  mmrepro {verb}' in out


@pytest.mark.parametrize('name, count', [('dist_train.sh', 2), ('dist_test.sh', 3),
                                         ('slurm_train.sh', 4)])
def test_shell_scripts_say_what_they_need(name, count):
    result = subprocess.run(['bash', os.path.join(TOOLS, name), *['x'] * (count - 1)],
                            capture_output=True, text=True)
    assert result.returncode == 2
    assert result.stderr.count(f'tools/{name}') == 2


def _recorded(tmp_path, name, arguments, **env):
    """The command that a shell script ends in, with the program replaced by a recorder."""
    recorder = tmp_path / 'recorder'
    recorder.write_text('#!/usr/bin/env bash\nprintf "%s\\n" "$@"\n')
    recorder.chmod(0o755)
    (tmp_path / 'srun').write_text(recorder.read_text())
    (tmp_path / 'srun').chmod(0o755)
    path = f'{tmp_path}{os.pathsep}{os.environ["PATH"]}'
    return subprocess.run(
        ['bash', os.path.join(TOOLS, name), *arguments], capture_output=True, text=True, check=True,
        env={**os.environ, 'PYTHON': str(recorder), 'PATH': path, **env}).stdout.splitlines()


def test_dist_train_passes_arguments_on(tmp_path):
    words = _recorded(tmp_path, 'dist_train.sh', ['c.py', '4', '--seed', '1', '--work-dir', 'a b'],
                      PORT='1234')
    assert words[:2] == ['-m', 'torch.distributed.run']
    assert '--nproc_per_node=4' in words and '--master_port=1234' in words
    assert words[-8:] == [os.path.join(TOOLS, 'train.py'), 'c.py', '--launcher', 'pytorch',
                          '--seed', '1', '--work-dir', 'a b']


def test_dist_test_passes_arguments_on(tmp_path):
    words = _recorded(tmp_path, 'dist_test.sh', ['c.py', 'w.pth', '2', '--out', 'r.pkl'])
    assert words[-7:] == [os.path.join(TOOLS, 'test.py'), 'c.py', 'w.pth', '--launcher', 'pytorch',
                          '--out', 'r.pkl']


def test_slurm_train_passes_arguments_on(tmp_path):
    words = _recorded(tmp_path, 'slurm_train.sh', ['part', 'job', 'c.py', 'w', '--seed', '1'],
                      GPUS='16', GPUS_PER_NODE='8', SRUN_ARGS='--exclusive --mem=0')
    assert words[0] == '--partition=part' and '--ntasks=16' in words
    assert '--exclusive' in words and '--mem=0' in words
    assert words[-5:] == ['w', '--launcher', 'slurm', '--seed', '1']


TRAIN_CONFIG = """
_base_ = [{base!r}]
train_cfg = dict(max_epochs=2)
default_hooks = dict(checkpoint=dict(interval=1))
"""


@pytest.fixture(scope='module')
def trained(tmp_path_factory):
    """A folder with a config trained by tools/train.py, a function that runs a script, the log."""
    from mmrepro.demo import demo_config, write_dataset
    folder = tmp_path_factory.mktemp('trained')
    write_dataset(str(folder / 'data' / 'demo'), 0, 4, 2)
    (folder / 'config.py').write_text(TRAIN_CONFIG.format(
        base=demo_config.shipped('configs/demo/yolox_s_demo.py')))
    env = {k: v for k, v in os.environ.items() if k not in ('PYTHONHASHSEED', start.RESTARTED)}

    def run(script, *arguments, **variables):
        result = subprocess.run(
            [sys.executable, script, *arguments], cwd=folder, env={**env, **variables}, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        assert result.returncode == 0, result.stdout[-4000:]
        return result.stdout

    output = run(os.path.join(TOOLS, 'train.py'), 'config.py', '--seed', '7')
    return folder, run, output


def _weights(path):
    import torch

    from mmrepro.digests import state_digest
    return state_digest(torch.load(path, map_location='cpu', weights_only=False)['state_dict'])


@pytest.mark.slow
def test_train_starts_again_once_and_writes_the_seed_into_the_config(trained):
    folder, _, output = trained
    assert output.count('starting again with') == 1
    dumped = Config.fromfile(str(folder / 'work_dirs' / 'config' / 'config.py'))
    assert dumped.randomness.seed == 7


@pytest.mark.slow
def test_mmdetections_own_script_trains_to_the_same_bits(trained):
    import mmdet
    folder, run, _ = trained
    script = os.path.join(os.path.dirname(mmdet.__file__), '.mim', 'tools', 'train.py')
    run(script, 'config.py', '--work-dir', 'stock', '--cfg-options', 'randomness.seed=7',
        PYTHONHASHSEED='1', PYTHONPATH=ROOT)
    ours = _weights(folder / 'work_dirs' / 'config' / 'epoch_2.pth')
    assert _weights(folder / 'stock' / 'epoch_2.pth') == ours


@pytest.mark.slow
def test_test_evaluates_what_train_wrote(trained):
    folder, run, _ = trained
    checkpoint = str(folder / 'work_dirs' / 'config' / 'epoch_2.pth')
    run(os.path.join(TOOLS, 'test.py'), 'config.py', checkpoint, '--out', 'result.pkl')
    with open(folder / 'result.pkl', 'rb') as file:
        assert len(pickle.load(file)) == 2
