"""``mmrepro seeds``: what is run, what is not run again, what is said."""
import json
import math
import os
import re
import sys
from pathlib import Path

import pytest
from command import exit_code
from fake_runs import write_log

from mmrepro.errors import PREEMPTED, SeedsError, TrainingError
from mmrepro.report.seed_study import study, study_report
from mmrepro.runs.launcher import TrainingFailed
from mmrepro.verbs.seeds import (
    NOTHING_FOUND,
    SeedFailed,
    jobs_of,
    metrics_of,
    parse_seeds,
    result_of,
    run_job,
    value_of,
)

SEEDS = sys.modules['mmrepro.verbs.seeds']  # mmrepro.verbs.seeds is the function

CONFIG = """
custom_imports = dict(imports=['mmrepro'], allow_failed_imports=False)
randomness = dict(seed=42, deterministic=True)
model = dict(type='Detector', width={width})
"""


@pytest.fixture
def config(tmp_path, monkeypatch):
    """Write a config into the folder in which commands start."""
    monkeypatch.chdir(tmp_path)

    def write(name='base', width=1):
        Path(f'{name}.py').write_text(CONFIG.format(width=width))
        return f'{name}.py'
    return write


def after(command, option):
    return command[command.index(option) + 1]


@pytest.fixture
def started(monkeypatch):
    """Replace the trainings: record what was started, with a metric of seed and config."""
    commands = []

    def start(runs):
        command = runs[0].launches[0].command
        commands.append(command)
        folder, seed = after(command, '--work-dir'), int(after(command, '--seed'))
        better = .02 + .001 * seed if 'mine' in command[2] else 0.
        write_log(folder, 2, val=.3 + .01 * (seed % 3) + better)

    monkeypatch.setattr(SEEDS, 'run_all', start)
    return commands


@pytest.fixture
def ended(monkeypatch):
    def end(code, text=''):
        def start(runs):
            log = runs[0].launches[0].log
            os.makedirs(os.path.dirname(log), exist_ok=True)
            Path(log).write_text(text)
            if code:
                raise TrainingFailed(code, log)

        monkeypatch.setattr(SEEDS, 'run_all', start)
    return end


def run(*arguments):
    return exit_code('seeds', *arguments, '--work-dir', 'out', '--no-plots')


@pytest.mark.parametrize('text, expected', [
    ('3', [3]), ('0..4', [0, 1, 2, 3, 4]), ('5, 0..1', [5, 0, 1]), ('7..7', [7])])
def test_seeds_are_lists_and_ranges(text, expected):
    assert parse_seeds(text) == expected


@pytest.mark.parametrize('text, message', [
    *((text, '--seeds') for text in (
        '', 'a', '²', '1..²', '1..', '1,1', '0..3,2', '-1', '0..4294967296')),
    ('0, 5..1', r"'5\.\.1' is not allowed: it counts down; write 1\.\.5"),
    ('4294967296', 'a seed is at most 4294967295'),
    ('0..10000', 'at most 10000 seeds')])
def test_seeds_that_are_refused_say_why(text, message):
    with pytest.raises(SeedsError, match=message):
        parse_seeds(text)


def test_every_seed_gets_a_process_and_a_folder(config, started, capsys):
    given = ['--cfg-options', '+a.b=[1,2]', 'model.c=x']
    assert run(config(), '--seeds', '0..2', *given) == 0
    assert [after(command, '--seed') for command in started] == ['0', '1', '2']
    command = started[0]
    assert command[:3] == ['mmrepro', 'train', 'base.py']
    assert after(command, '--work-dir') == os.path.join('out', 'base', 'seed_0')
    assert command[-3:] == given and '--resume' not in command
    said = capsys.readouterr()
    assert '0.3100' in said.out and 'mean' in said.out
    assert 'run 2 of 3: base, seed 1' in said.err


def test_a_finished_seed_is_not_run_again_and_an_unfinished_one_is_resumed(config, started, capsys):
    run(config(), '--seeds', '0..1')
    folder = Path('out', 'base', 'seed_2')
    folder.mkdir()
    (folder / 'epoch_1.pth').touch()
    started.clear()
    run('base.py', '--seeds', '0..3')
    assert [after(command, '--seed') for command in started] == ['2', '3']
    assert ['--resume' in command for command in started] == [True, False]
    assert '2 of 4 runs are there already' in capsys.readouterr().err


def test_a_changed_config_is_not_mixed_in(config, started, capsys):
    run(config(), '--seeds', '0')
    assert run(config(width=2), '--seeds', '0') == 2
    assert 'other settings' in capsys.readouterr().err
    assert run('base.py', '--seeds', '0', '--report-only', '--cfg-options', 'model.width=1') == 0
    config(width=1)  # another seed in the file itself changes nothing, and neither a work_dir
    text = Path('base.py').read_text()
    Path('base.py').write_text(text.replace('seed=42', 'seed=7') + "work_dir = 'x'\n")
    assert exit_code('seeds', 'base.py', '--seeds', '0', '--work-dir', 'out', '--report-only') == 0
    assert {'seeds.png', 'seeds.html', 'seeds.json'} <= set(os.listdir('out'))


@pytest.mark.parametrize('code, output, error, message', [
    (1, 'CUDA out of memory\n', SeedFailed,
     '(?s)seed 0: .*out of memory.*ended with exit code 1 '),
    (PREEMPTED, '', TrainingError, 'pre-empted.*same command continues'),
    (0, '', SeedFailed, 'no validation metrics .*set val_dataloader'),
    (0, f'mmengine - ERROR - {NOTHING_FOUND}.\n', SeedFailed,
     'found nothing at all, for which there is no metric. Train longer'),
])
def test_a_seed_without_a_result_says_why(config, ended, code, output, error, message):
    job, = jobs_of(config(), 'base', [0], 'out')
    ended(code, output)
    with pytest.raises(error, match=message):
        run_job(job)
    assert result_of(job) is None
    Path(job.folder, 'result.json').write_text('{')
    with pytest.raises(SeedsError, match='not JSON.*remove it'):
        result_of(job)


@pytest.fixture
def some_fail(started, monkeypatch):
    """Let seed 1 end with an error, and seed 2 find nothing."""
    train = SEEDS.run_all

    def start(runs):
        launch = runs[0].launches[0]
        seed = after(launch.command, '--seed')
        os.makedirs(os.path.dirname(launch.log), exist_ok=True)
        Path(launch.log).write_text(f'first\n{NOTHING_FOUND}\n' if seed == '2' else 'no memory\n')
        if seed == '1':
            raise TrainingFailed(1, launch.log)
        if seed != '2':
            train(runs)

    monkeypatch.setattr(SEEDS, 'run_all', start)
    return started


def test_a_seed_without_a_result_is_a_row_and_the_study_goes_on(config, some_fail, capsys):
    arguments = config(), '--seeds', '0..3', '--compare', config('mine', 2)
    assert run(*arguments) == 1
    said = capsys.readouterr()
    for name in ('base', 'mine'):
        assert re.search(f'{name}, seed 1 +exit code 1: no memory +out', said.out)
        assert re.search(f'{name}, seed 2 +the detector found nothing +out', said.out)
    assert 'base, seed 1 has no result: exit code 1: no memory; the study goes on' in said.err
    assert len(some_fail) == 4 and 'their seeds are left out of all configs' in said.out
    assert run(*arguments, '--json') == 1
    data = json.loads(capsys.readouterr().out)
    assert data['seeds'] == [0, 3] and len(data['failed']) == 4
    assert len(some_fail) == 4  # what has finished is not trained again


def test_a_study_without_any_result_says_why(config, some_fail, capsys):
    assert run(config(), '--seeds', '1,2') == 2
    assert '0 of 2 seeds have a result' in (error := capsys.readouterr().err)
    assert 'no memory' in error and 'found nothing at all' in error
    assert run('base.py', '--seeds', '0..3', '--vary', 'init') == 2
    assert 'at least 3 must' in capsys.readouterr().err


def test_metrics_are_read_beside_what_a_witness_has_left(tmp_path):
    write_log(tmp_path, 2, val=.3)
    (tmp_path / 'mmrepro').mkdir()
    (tmp_path / 'mmrepro' / 'recipe.json').write_text('{}')
    assert metrics_of(str(tmp_path))['coco/bbox_mAP'][-1][1] == .3


def test_pretrained_weights_are_settings(config):
    jobs = [jobs_of(config(), 'base', [0], '', changes=changes)[0] for changes in (
        {}, dict(load_from=None), dict(load_from='a.pth'), dict(load_from='b.pth'))]
    assert [len({job.digest for job in jobs[:count]}) for count in (2, 3, 4)] == [1, 2, 3]


def test_mmdetection_says_so_in_these_words():
    import inspect

    from mmdet.evaluation import CocoMetric
    assert NOTHING_FOUND in inspect.getsource(CocoMetric)


def test_configs_are_tested_pair_by_pair_and_corrected_for_asking_twice(config, started, capsys):
    arguments = config(), '--seeds', '0..5', '--compare', config('mine', 2)
    assert run(*arguments) == 0
    assert 'by more than the noise of the seed' in capsys.readouterr().out
    started.clear()
    assert run(*arguments, '--json') == 0
    said = json.loads(capsys.readouterr().out)
    assert started == [] and said['test']['larger'] and said['test']['flip_p'] == 2 / 2**6
    assert said['metric'] == 'coco/bbox_mAP' and len(said['values']['mine']) == 6
    assert run(*arguments[:4], config('other', 3)) == 1
    assert run(*arguments, 'other.py') == 0
    assert "Holm's method: mine" in capsys.readouterr().out
    run(*arguments, 'other.py', '--json')
    said = json.loads(capsys.readouterr().out)
    assert said['test'] is None and set(said['tests']) == {'mine', 'other'}
    assert said['corrected']['mine'] == 2 * said['tests']['mine']['t_p']


def test_few_seeds_and_best_validations_get_a_caution():
    assert study('m', 'last', [0], {'a': [.1], 'b': [.2]}).corrected == {'b': 1.}

    def notes(count, pick='last', step=.1):
        values = [step * i for i in range(count)]
        return ' '.join(study_report(study('m', pick, list(range(count)), {'a': values})).notes)

    result = dict(metrics={'m': [[1, .5], [2, .4]]})
    assert value_of(result, 'm') == .4 and value_of(result, 'm', 'best') == .5
    for values in ([[1, math.nan], [2, .4]], [[1, .4], [2, math.nan]]):
        assert value_of(dict(metrics={'m': values}), 'm', 'best') == .4
    assert 'too few' in notes(2) and '6 or more' in notes(4) and notes(6) == ''
    assert 'too high' in notes(6, 'best')
    assert 'a: all seeds give the same m' in notes(6, step=0)


def test_the_page_of_three_configs_has_corrected_values():
    values = {'base': [.30, .31, .29], 'mine': [.33, .34, .31]}
    report = study_report(study('m', 'last', [0, 1, 2], dict(values, third=[.3, .3, .31])))
    assert "Holm&#x27;s p" in report.html() and report.images['seeds'].startswith(b'\x89PNG')


def test_one_stream_varies_at_a_time_and_all_together(config, started, capsys):
    assert run(config(), '--seeds', '3..5', '--vary', 'init,step') == 0
    # all three seeds, then two more of each stream: the first run is that of every stream
    given = [(after(command, '--seed'), command[-1], Path(after(command, '--work-dir')).name)
             for command in started]
    assert [(seed, folder) for seed, _, folder in given] == [
        ('3', 'seed_3'), ('4', 'seed_4'), ('5', 'seed_5'), ('3', 'init_4'), ('3', 'init_5'),
        ('3', 'step_4'), ('3', 'step_5')]
    assert [last for _, last, _ in given[3:]] == [
        f'randomness.streams.{name}={seed}' for name in ('init', 'step') for seed in (4, 5)]
    # the metric of these runs follows --seed alone
    said = capsys.readouterr()
    assert 'init, step: the metric stays exactly the same' in said.out
    assert 'run 4 of 7: base, init 4' in said.err
    started.clear()
    assert run('base.py', '--seeds', '3..5', '--vary', 'init,step', '--json') == 0
    shares = json.loads(capsys.readouterr().out)['shares']
    assert started == [] and shares['init'] == dict(value=0, low=0, high=0)
    # an ordinary study shares its runs
    assert run('base.py', '--seeds', '3..5') == 0 and started == []


@pytest.mark.parametrize('arguments, message', [
    (['--vary', 'smaple'], "--vary smaple: .*unknown stream 'smaple'.*did you mean 'sample'"),
    (['--vary', 'init,init'], 'init is listed twice'),
    (['--vary', 'sample', '--cfg-options', 'randomness.worker_seed=worker'], 'sample=0 has no'),
    (['--vary', 'init', '--cfg-options', 'randomness.streams.init=1'], 'fixes randomness.streams'),
    (['--vary', 'init', '--seeds', '0,1'], 'at least 3 seeds, and --seeds 0,1 has 2'),
    (['--vary', 'init', '--compare', 'b.py'], '--compare and --vary exclude each other'),
    (['--compare', 'base.py'], 'two configs are called base'),
    (['--metric', 'coco/map'], 'all have: coco/bbox_mAP'),
    (['--report-only', '--seeds', '0..1'], 'not finished: base, seed 0, base, seed 1'),
])
def test_wrong_usage_is_one_line(config, started, capsys, arguments, message):
    assert run(config(), *arguments) == 2
    error = capsys.readouterr().err
    assert re.search(message, error), error


HERE = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), 'support')


@pytest.mark.nightly
def test_seeds_differ_repeat_and_are_not_trained_twice(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv('PYTHONPATH', HERE)
    config = os.path.join(HERE, 'toy_config.py')

    def values(folder, *more):
        assert exit_code('seeds', config, '--work-dir', tmp_path / folder, '--no-plots', *more,
                         '--json') == 0
        return json.loads(capsys.readouterr().out)['values']['toy_config']

    both = values('first', '--seeds', '0..1')
    assert len(set(both)) == 2 and all(.5 < value < 1 for value in both)
    assert values('first', '--seeds', '0..1', '--report-only') == both
    # interrupted after the first of two validations, then resumed by the same command
    folder = tmp_path / 'second' / 'toy_config' / 'seed_1'
    source = tmp_path / 'first' / 'toy_config' / 'seed_1'
    folder.mkdir(parents=True)
    os.link(source / 'epoch_3.pth', folder / 'epoch_3.pth')
    assert values('second', '--seeds', '1') == both[1:]
    assert not (folder / 'epoch_1.pth').exists() and (folder / 'epoch_6.pth').exists()
