"""The command ``mmrepro VERB``: verbs, help, exit codes; errors become a message."""
import os
import re
import subprocess
import sys
from unittest.mock import Mock

import pytest
from command import exit_code
from harness import ROOT, fresh
from mmengine.runner import Runner

import mmrepro  # noqa: F401  attaches itself
from mmrepro import cli, errors
from mmrepro.cli import arguments
from mmrepro.errors import DIFFERENT, INTERRUPTED, READER_LEFT, USAGE, ConfigError, StepDiffersError


def test_the_help_names_all_verbs_and_exit_codes_and_unknown_verbs_are_refused(capsys):
    assert cli.main(['--help']) == 0
    out = capsys.readouterr().out
    assert all(verb in out for verb in cli.VERBS) and len(cli.VERBS) <= 12
    assert all(f'{code:>3}  {text}' in out for code, text in errors.MEANINGS.items())
    assert (errors.meaning(-15), errors.meaning(77)) == ('killed by SIGTERM', 'unknown')
    assert cli.main(['trian']) == 2
    assert capsys.readouterr().err == (
        "mmrepro: unknown verb 'trian'; did you mean 'train'? (see mmrepro --help)\n")
    assert cli.main(['nothing-like-it']) == 2
    assert 'verbs: demo, train, test' in capsys.readouterr().err
    assert cli.main([]) == 2
    assert 'usage: mmrepro VERB' in capsys.readouterr().err


@pytest.mark.parametrize('verb, error, code, said', [
    ('verify', KeyboardInterrupt, INTERRUPTED, '\nmmrepro verify: interrupted'),
    ('seeds', KeyboardInterrupt, INTERRUPTED,
     '\nmmrepro seeds: interrupted; the same command continues'),
    ('train', KeyboardInterrupt, INTERRUPTED, '\nmmrepro train: interrupted; the same command with '
     '--resume continues from the latest checkpoint, if one was written'),
    ('train', ConfigError('wrong'), USAGE, 'mmrepro train: wrong'),
    ('train', StepDiffersError('wrong'), DIFFERENT, 'mmrepro train: wrong')])
def test_an_interrupt_or_an_error_of_mmrepro_is_a_message_and_an_exit_code(
        verb, error, code, said, monkeypatch, capsys):
    monkeypatch.setattr(cli, 'load', lambda name: Mock(side_effect=error))
    assert cli.main([verb, 'CONFIG']) == code
    assert capsys.readouterr().err == f'{said}\n'


@pytest.mark.parametrize('verb', cli.VERBS)
def test_every_verb_has_help_with_an_example_and_wrong_usage_is_one_line(verb, capsys):
    assert exit_code(verb, '--help') == 0
    out = capsys.readouterr().out
    assert re.search(rf'examples?:\n  mmrepro {verb}', out) and '==SUPPRESS==' not in out
    assert not re.search(r'--?\w+-$', out, re.M)  # an option is in one piece
    assert exit_code(verb, '--no-such-option') == errors.USAGE
    said = capsys.readouterr().err
    assert said.startswith(f'mmrepro {verb}: ') and said.count('\n') == 1
    assert said.endswith(f'(see mmrepro {verb} --help)\n')


# what can be built without a detector, or is refused before one is
CONFIG = """
work_dir = {work!r}
default_scope = None
model = dict(type='NoisyLine')
train_dataloader = dict(batch_size=2, num_workers=0, dataset=dict(type='Points'),
                        sampler=dict(type='DefaultSampler', shuffle=True))
train_cfg = dict(by_epoch=False, max_iters=1)
optim_wrapper = dict(optimizer=dict(type='SGD', lr=.1))
default_hooks = dict(checkpoint=dict(type='CheckpointHook', interval=-1, save_last=False))
randomness = dict(seed=1)
"""


@pytest.fixture
def config(tmp_path, monkeypatch):
    import small_runs  # noqa: F401  registers NoisyLine and Points
    monkeypatch.setattr(arguments, 'restart_for', lambda cfg: None)
    monkeypatch.setattr(arguments, 'build_runner', Runner.from_cfg)
    monkeypatch.setenv('LOCAL_RANK', '0')
    path = tmp_path / 'config.py'
    path.write_text(CONFIG.format(work=str(tmp_path / 'work')))
    return path


def refused(capsys, *arguments):
    """Return the one line that the command says, with the exit code of wrong usage."""
    assert exit_code(*arguments) == USAGE
    text = capsys.readouterr().err
    said = [line for line in text.splitlines() if line.startswith('mmrepro ')]
    assert len(said) == 1 and 'Traceback' not in text and 'usage' not in text
    return said[0]


@pytest.mark.parametrize('hook, option, message', [
    ("dict(type='FingerprintHook', level='deep')", None,
     "FingerprintHook: level='deep' is not allowed; allowed: 'step', 'parameter'"),
    ("dict(type='PreemptHook', signals=('SIGFOO', ))", None, "'SIGFOO' cannot announce an end"),
    ("dict(type='OperatorGuardHook', on_unknown='shout')", None,
     "OperatorGuardHook: on_unknown='shout'"),
    ("\"dict(type='FingerprintHook')\"", None, '--fingerprint'),
    ('', 'nonsense', "'nonsense' must be KEY=VALUE"),
    ('', 'a.b=[1,(2]', 'brackets'),
    ('', "custom_hooks=[dict(type='FingerprintHook')]", '--fingerprint'),
    ('', "custom_hooks=[dict(type='FingerprintHook',level='module')]", 'belongs into the config'),
])
def test_a_hook_that_is_refused_and_an_option_that_cannot_be_read(config, capsys, hook, option,
                                                                  message):
    config.write_text(config.read_text() + f'custom_hooks = [{hook}]\n')
    options = ['--cfg-options', option] if option else []
    assert message in refused(capsys, 'train', config, *options)


@pytest.mark.parametrize('command, option', [
    ('compare CONFIG CONFIG', '--out'), ('test CONFIG x.pth', '--out'),
    ('verify CONFIG', '--json'), ('verify CONFIG', '--work-dir'), ('localise CONFIG', '--work-dir'),
    ('demo', '--work-dir'), ('train CONFIG', '--work-dir'), ('golden check', '--work-dir'),
    ('seeds CONFIG', '--work-dir'), ('replay .', '--work-dir')])
def test_a_result_that_cannot_be_written_is_said_at_once(command, option, config, capsys, tmp_path):
    (tmp_path / 'file').touch()
    words = command.replace('CONFIG', str(config)).split()
    said = refused(capsys, *words, option, tmp_path / 'file' / 'w' / 'r.pkl')
    assert f'{tmp_path}/file/w/r.pkl: ' in said and 'cannot be made' in said


@pytest.mark.parametrize('command, message', [
    ('golden check --json CONFIG', 'is not a .json file; it is not overwritten'),
    ('doctor --json .', '--json .: exists, and is not a .json file'),
    ('train --fingerprint CONFIG', 'step, parameter, module, operator, or no value (put the config '
     'first)'),
    ('compare a b --python python', '--python needs --trace'),
    ('compare a b --image c', '--image needs --onnx'),
    ('compare a b --onnx m --trace', '--trace has no meaning with --onnx'),
    ('test CONFIG x.pth --image A', '--image A --with B: give both'),
    ('test CONFIG x.pth --image A --with B --tta', '--tta has no meaning with --image'),
    ('test CONFIG x.pth --image CONFIG --with no.png', 'no.png: no such image'),
    ('test CONFIG x.pth --json r.json', '--json needs --image'),
    ('test CONFIG x.pth --score-thr 0.5', '--score-thr needs --image'),
    ('verify CONFIG --vary kills', '--vary kills: interruptions at random moments are tested in a '
     'checkout of mmrepro: python -m dev.kills CONFIG'),
    ('verify . --virtual-ranks 2', '--virtual-ranks has no meaning for a work directory'),
    ('demo --data-only --epochs 3', '--epochs has no meaning with --data-only'),
    ('demo --images 100', '--images 100: the dataset has 24'),
    ('golden record CONFIG --missing pass', '--missing is for check')])
def test_an_option_that_would_do_nothing_or_harm_is_refused(command, message, config, capsys):
    before = config.read_bytes()
    assert message in refused(capsys, *command.replace('CONFIG', str(config)).split())
    assert config.read_bytes() == before


@pytest.mark.parametrize('verb', ['train', 'test', 'verify', 'localise', 'audit'])
@pytest.mark.parametrize('broken, said', [
    (True, "line 1: '(' was never closed"), (False, 'did you mean train_cfg.max_iters?')])
def test_a_config_or_an_option_that_is_wrong(verb, broken, said, config, capsys, tmp_path):
    if broken:
        config.write_text('model = dict(\n')
    given = ['x.pth'] if verb == 'test' else []
    options = ['--cfg-options', 'train_cfg.max_iter=1']
    if verb != 'audit':
        options += ['--work-dir', tmp_path / 'w']
    assert said in refused(capsys, verb, config, *given, *options)


def test_annotations_that_are_missing(config, capsys, tmp_path):
    data = dict(type='mmdet.CocoDataset', data_root=str(tmp_path), ann_file='no/such.json')
    config.write_text(config.read_text() + f'train_dataloader["dataset"] = {data!r}\n')
    said = refused(capsys, 'train', config)
    assert f'{tmp_path}/no/such.json does not exist, and train_dataloader' in said
    assert 'data_root' in said


@pytest.mark.parametrize('error', [
    ValueError('of a user'), FileNotFoundError(2, 'No such file', '/no/such/image.png'),
    PermissionError(13, 'Permission denied', '/image.png'), KeyError('key'),
    BrokenPipeError('to a worker')])
def test_any_other_error_keeps_its_traceback(error, config, monkeypatch):
    monkeypatch.setattr(arguments, 'build_runner', Mock(side_effect=error))
    with pytest.raises(type(error)):
        cli.main(['train', str(config)])


@pytest.mark.parametrize('words', [
    ('golden', 'check', '--goldens', 'none', 'CONFIG'), ('localise', 'none', '--no-values', 'b')])
def test_options_may_stand_between_paths(words, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert exit_code(*words) == 2
    assert 'none: no' in capsys.readouterr().err


def test_a_full_disk_is_no_wrong_setting(config, capsys, monkeypatch):
    error = OSError(28, 'No space left on device', 'work/iter_1.pth')
    monkeypatch.setattr(arguments, 'build_runner', Mock(side_effect=error))
    assert exit_code('train', str(config)) == 1
    assert capsys.readouterr().err.splitlines()[-1].startswith(
        'mmrepro train: work/iter_1.pth cannot be written or read: No space left on device (')
    error.filename = None  # as where a write has failed
    assert exit_code('train', str(config), '--work-dir', 'work') == 1
    assert 'whose work_dir is work, cannot be written' in capsys.readouterr().err


@pytest.mark.parametrize('path, wanted', [
    ('', "'': no such"), (' ', "' ': no such"), ('a folder', 'a folder: a folder, not a'),
    ('no folder/x', 'no folder/x: no such'), ('note.txt', 'note.txt: '), ('pic.png', 'pic.png: '),
    ('x.json', 'x.json: ')])
def test_an_odd_path_comes_back_in_the_message(path, wanted, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / 'a folder').mkdir()
    for name, content in (('note.txt', b'hi'), ('pic.png', b'\x89PNG\0\xff'), ('x.json', b'{}')):
        (tmp_path / name).write_bytes(content)
    for verb, *more in (['train'], ['verify'], ['replay'], ['compare', '.']):
        said = refused(capsys, verb, path, *more)
        assert (wanted in said or f'{path}: ' in said) and 'near' not in said


@pytest.mark.parametrize('given, level', [([], 'step'), (['module'], 'module')])
def test_fingerprints_are_added_to_the_hooks_of_the_config(config, monkeypatch, given, level):
    build = Mock()
    monkeypatch.setattr(arguments, 'build_runner', build)
    hooks = [dict(type='EMAHook'), dict(type='FingerprintHook')]
    config.write_text(config.read_text() + f'custom_hooks = {hooks}\n')
    cli.main(['train', str(config), '--fingerprint', *given])
    (cfg, ), _ = build.call_args
    assert [hook.type for hook in cfg.custom_hooks] == ['EMAHook', 'FingerprintHook']
    assert cfg.custom_hooks[1].level == level


def test_a_process_that_starts_again_has_imported_neither_torch_nor_custom_modules(tmp_path):
    (tmp_path / 'config.py').write_text(
        "model = {}; custom_imports = dict(imports=['broken', 'mmrepro'])\n")
    (tmp_path / 'broken.py').write_text('1 / 0')
    code = ("import os, sys; from mmrepro import cli; os.execve = lambda *args: sys.exit(f'AGAIN "
            "{sorted({\"torch\", \"mmdet\"} & {*sys.modules})}'); cli.main(sys.argv[1:])")
    done = fresh('-c', code, 'train', 'config.py', '--deterministic', '--virtual-ranks', 2,
                 '--cfg-options', 'randomness.seed=1', code=1, cwd=tmp_path, PYTHONHASHSEED=None)
    assert 'AGAIN []' in done.stderr, done.stderr


def test_a_reader_that_leaves_is_no_error(tmp_path):
    code = ('import sys; from mmrepro import cli\n'
            'def verb(argv):\n'
            '    print("line\\n" * 100000)\n'
            '    return 0\n'
            'cli.load = lambda name: verb\n'
            'sys.exit(cli.main(["compare"]))')
    process = subprocess.Popen([sys.executable, '-c', code], stdout=subprocess.PIPE,
                               stderr=subprocess.PIPE, env={**os.environ, 'PYTHONPATH': str(ROOT)})
    process.stdout.readline()
    process.stdout.close()
    assert process.stderr.read() == b'' and process.wait() == READER_LEFT
