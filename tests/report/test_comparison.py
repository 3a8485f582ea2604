"""Two runs compared, those of stock MMEngine and of MMDetection 2.x as well."""
import json
import math
import os
import re
import shutil
import sys
from pathlib import Path

import pytest
import torch
from command import exit_code
from fake_runs import NAMES, step, write_log, write_run
from harness import python
from mmengine.config import Config

from mmrepro import cli
from mmrepro.checkpoint.files import load
from mmrepro.config import RandomnessConfig
from mmrepro.distributed.agreement import randomness_fields
from mmrepro.errors import RunError
from mmrepro.facts.compatibility import doubts
from mmrepro.report import comparison, plots
from mmrepro.report.compare import advice, measure, relative, report_of
from mmrepro.report.comparison import compare_paths as compare
from mmrepro.report.run_view import load_run

PNG = b'\x89PNG\r\n\x1a\n'
FINGERPRINTS = 'mmrepro/fingerprints.rank0.jsonl'
START = Path('a/20260101_000000')
SCALARS = START / 'vis_data' / 'scalars.json'


def main(*arguments):
    return cli.main(['compare', *arguments])


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def pair(a=(), b=(), write=write_run):
    return write('a', **dict(a)), write('b', **dict(b))


def save(path, iteration=20, **weights):
    torch.save(dict(meta=dict(iter=iteration), state_dict=weights), path)


def test_equal_runs_are_equal_and_told_apart_where_their_names_are_one():
    comparison = compare(*(write_run(f'{name}/run') for name in 'ab'))
    assert comparison.equal and comparison.exact and comparison.first is None
    assert comparison.verdict() == 'SAME BITS: 20 iterations, 0 to 19'
    assert comparison.manifest == [] and comparison.notes == []
    assert set(comparison.diverged.values()) == {None} and comparison.a.name != comparison.b.name


def test_level_parameter_names_the_parameters():
    comparison = compare(*pair(b=dict(since=7, noise=1e-9)))
    assert comparison.first.field.names == ('head.0.weight', 'head.1.weight')
    assert 'DIFFERENT: iteration 7: parameters (head' in comparison.verdict()
    assert comparison.differing == 13
    assert comparison.diverged == {name: 7 if name.startswith('head') else 8 for name in NAMES}
    steps, names, rows = comparison.norms
    assert steps == list(range(20)) and names == NAMES
    assert not any(any(row) for row in rows[:7]) and all(rows[8])


def test_level_step_names_no_parameters_and_says_how_to_get_them():
    comparison = compare(*pair(a=dict(level='step'), b=dict(level='step', since=7)))
    assert comparison.first.field.field == 'parameters' and comparison.first.field.names == ()
    assert comparison.diverged == {} and comparison.norms == ([], [], [])
    assert any('--fingerprint parameter' in line for line in advice(comparison))


def test_metrics_of_equal_iterations_may_differ():
    a, b = pair()
    path = Path(b, FINGERPRINTS)
    path.write_text(path.read_text().replace((.01 * 9).hex(), (.5).hex()))
    comparison = compare(a, b)
    assert not comparison.equal and comparison.first is None
    assert 'iteration 10, metric coco/bbox_mAP of the validation: 0.09' in comparison.verdict()


def test_other_lengths_are_said_and_the_common_part_is_compared():
    comparison = compare(*pair(b=dict(count=12, end=False)))
    assert comparison.equal and comparison.common == list(range(12))
    text = ' '.join(comparison.notes)
    assert 'not compared, because B lacks them: 8 iterations of A (12 to 19)' in text
    assert 'B: rank 0 did not come to its end; its last iteration is 11' in text


def test_a_rank_is_compared_with_the_same_rank(capsys):
    for other in (write_log('logged'), write_run('b', rank=1)):
        assert main(write_run('a', vals=False), other) == 3
        out = capsys.readouterr().out
        assert 'NOTHING TO COMPARE' in out and 'Losses' not in out
    write_run('a', rank=1, world=2, since=3, noise=1.)
    comparison = compare('a', 'b')  # ranks 0 and 1, and rank 1
    assert comparison.first.iteration == 3 and comparison.first.rank == 1
    assert comparison.diverged['head.0.weight'] == 3
    assert 'A has fingerprints of ranks [0, 1], B of [1]: [1] are compared' in comparison.notes


def test_what_runs_were_made_of_comes_by_severity():
    comparison = compare(*pair(
        a=dict(facts={'randomness.seed': 1, 'version.python': '3.11'},
               manifest=dict(code={'/p': dict(commit='1')})),
        b=dict(facts={'randomness.seed': 2, 'version.python': '3.12'},
               manifest=dict(code={'/p': dict(commit='2')}))))
    assert [(row.name, row.severity) for row in comparison.manifest] == [
        ('randomness.seed', 'changes bits'), ('code.p.commit', 'may change bits'),
        ('version.python', 'harmless')]


WEIGHTS = dict(initial_weights='start', weights={'/p/r50.pth': dict(sha256='0')}, iteration=0,
               resumed_from=None)
LATER = dict(initial_weights='later', weights={}, iteration=10, resumed_from='/a/iter_10.pth')


def _start_again(folder, **changes):
    records = Path(folder, 'mmrepro')
    content = json.loads((records / 'manifest.json').read_text())
    number = len(list(records.glob('manifest*')))
    (records / f'manifest.{number}.json').write_text(json.dumps({**content, **changes}))


def test_a_run_that_was_resumed_began_from_the_same_weights():
    a, b = pair(dict(manifest=WEIGHTS), dict(manifest=WEIGHTS))
    _start_again(b, **LATER)
    comparison = compare(a, b)
    assert comparison.equal and comparison.manifest == []
    # trained again in the same folder, from other weights
    _start_again(b, **dict(WEIGHTS, initial_weights='other'))
    _start_again(b, **LATER)
    assert [row.name for row in compare(a, b).manifest] == ['initial_weights']


def test_a_run_that_was_resumed_elsewhere_is_not_said_to_start_from_other_weights():
    comparison = compare(*pair(dict(manifest=WEIGHTS), dict(manifest=LATER)))
    assert {row.name: row.severity for row in comparison.manifest} == {
        'resumed_from': 'may change bits', 'iteration': 'harmless'}


RANDOMNESS = RandomnessConfig.parse(dict(seed=1, virtual_ranks=dict(ranks=2))).as_dict()


@pytest.mark.parametrize('facts, model, randomness, names', [
    ({'version.torch': '2'}, 'Y', dict(seed=1), ['mmrepro', 'config.model.type']),
    (randomness_fields(RANDOMNESS), 'X', RANDOMNESS, [])], ids=['different', 'equal'])
def test_a_manifest_and_a_config_are_compared_by_settings(facts, model, randomness, names):
    write_run('a', facts=facts)
    write_log('a')
    write_log('b', config=Config(dict(model=dict(type=model), randomness=randomness)).pretty_text)
    assert [row.name for row in compare('a', 'b').manifest] == names


def test_stock_runs_are_compared_by_their_logs_which_prove_no_bits():
    comparison = compare(*pair(b=dict(off=5), write=write_log))
    assert not comparison.exact and not comparison.equal
    assert (comparison.first.iteration, comparison.first.field.field) == (5, 'scalars.loss')
    assert any('no fingerprints' in note for note in comparison.notes)
    numbers = measure(comparison, 1e-6)
    assert not numbers.within and {'loss', 'loss_cls'} <= {row.field for row in numbers.distances}
    assert any('--fingerprint' in line for line in advice(comparison))
    # and equal ones are no proof of equal bits: times and memory differ between any two runs
    comparison = compare('a', write_log('c'))
    assert comparison.equal and comparison.verdict().startswith('SAME LOGS')
    assert 'bits were not recorded' in comparison.verdict()


def test_a_resumed_log_replaces_what_was_lost():
    write_log('a', 20)
    write_log('b', 20, off=11)
    with open('b/20260101_000000/vis_data/scalars.json', 'a') as file:
        file.write('{"coco/bbox_mAP": 0.9, "step": 2}\n')
    write_log('b', 15, stamp='20260102_000000', first=10)
    comparison = compare('a', 'b')
    assert list(comparison.b.logged_vals) == [1]
    # iterations 15 to 19 of the first start were lost, and were not trained again
    assert comparison.equal and comparison.b.starts == 2 and comparison.common == list(range(15))


def test_trainings_in_one_folder_are_told_apart():
    write_log('a', 20, off=3)
    write_log('a', 15, stamp='20260102_000000')
    write_log('a', 15, stamp='20260103_000000', first=10)
    write_log('b', 15)
    comparison = compare('a', 'b')
    assert comparison.equal and comparison.a.starts == 2
    assert [note for note in comparison.notes if 'trainings began' in note] == [
        'A: 2 trainings began in a; the last of them is compared. For the log of another, give '
        'its folder: a/20260101_000000']
    assert compare('a/20260101_000000', 'b').first.iteration == 3
    with SCALARS.open('a') as file:
        file.write('{"coco/bbox_mAP": 0.9, "step": 2}\n')  # the last one did not come to it
    assert list(load_run('a').logged_vals) == [1]


def test_a_run_that_resumes_another_folder_has_one_start():
    path = Path(write_run('a'), FINGERPRINTS)
    text = path.read_text()
    for begun in (4, 0):
        path.write_text(text.replace('"iteration": 0', f'"iteration": {begun}', 1))
        assert load_run('a').starts == 1
    path.write_text(text + text + text.replace('"iteration": 0', '"iteration": 20', 1))
    assert load_run('a').starts == 2


def test_a_log_alone_is_a_run_a_torn_one_is_said_and_a_damaged_one_is_an_error():
    write_log('a')
    for path in (START, SCALARS.parent, SCALARS):
        assert len(load_run(str(path)).scalars) == 20
    text = SCALARS.read_text()
    for end in ('', '\n'):
        SCALARS.write_text(f'{text}{{"loss": 0.{end}')
        assert any('torn off' in note for note in load_run('a').notes)
    SCALARS.write_text(text.replace('{"lr"', '{lr', 1))
    with pytest.raises(RunError, match='line 1: not JSON'):
        load_run('a')


def test_without_fingerprints_of_one_run_the_logs_are_compared():
    write_run('a')
    write_log('a')
    write_log('b', off=4)
    comparison = compare('a', 'b')
    assert comparison.first.iteration == 4
    assert any(note.startswith('B: no fingerprints') for note in comparison.notes)


def stock_config(workers=0, **randomness):
    return (f'train_dataloader = dict(num_workers={workers})\n'
            f'randomness = dict(seed=1{"".join(f", {k}={v!r}" for k, v in randomness.items())})\n')


def test_that_one_run_had_mmrepro_is_said_first_and_instead_of_its_settings(capsys, monkeypatch):
    monkeypatch.setenv('COLUMNS', '200')
    write_log('a', config=stock_config(worker_seed='sample', step_seed=True,
                                                  operators='torch', deterministic=False))
    write_log('b', config=stock_config(2), off=3)
    assert main('a', 'b') == 1
    lines = capsys.readouterr().out.splitlines()
    notes = [line for line in lines if line.startswith('note: ')]
    assert notes[0] == ('note: A was trained with mmrepro and B without it: their random numbers '
                        'and kernels are not the same, so their bits cannot agree')
    start = next(i for i, line in enumerate(lines) if line.strip().startswith('name '))
    assert lines[start + 1].split()[:3] == ['mmrepro', 'True', 'False']
    names = [line.split()[0] for line in lines[start + 1:lines.index('', start)]]
    # deterministic=False is what a stock run has that says nothing
    assert names == ['mmrepro', 'config.train_dataloader.num_workers']


def test_equal_checkpoints_are_said_where_logs_are_all_there_is():
    for name in 'ab':
        write_log(name)
        for epoch in (1, 2):
            save(f'{name}/epoch_{epoch}.pth', epoch, w=torch.ones(2))
    comparison = compare('a', 'b')
    assert 'the weights in 2 of 2 checkpoints have the same bits (epoch_1.pth to epoch_2.pth)' in (
        comparison.verdict())
    # the sign of a zero, another key, another shape
    zero = torch.zeros(1)
    save('b/epoch_2.pth', w=zero)
    for equal, weights in ((True, dict(w=zero)), (False, dict(w=-zero)),
                           (False, dict(w=zero, v=zero)), (False, dict(w=torch.zeros(2)))):
        save('a/epoch_2.pth', **weights)
        comparison = compare('a', 'b')
        assert [row.distance for row in comparison.weights] == [0., 0.]
        assert comparison.equal is equal
        assert ('checkpoints differ' in comparison.verdict()) is not equal


def test_nan_is_equal_to_nan():
    write_log('a')
    SCALARS.write_text(SCALARS.read_text().replace('"grad_norm": 1.0', '"grad_norm": NaN'))
    shutil.copytree('a', 'b')
    assert compare('a', 'b').equal


def test_a_folder_without_a_run_says_what_is_in_it(tmp_path):
    with pytest.raises(RunError, match='x: no such run'):
        load_run('x')
    (tmp_path / 'epoch_1.pth').touch()
    with pytest.raises(RunError, match='epoch_1.pth: a file, not a run: give its folder'):
        compare('epoch_1.pth', 'epoch_1.pth')
    with pytest.raises(RunError, match='it holds epoch_1.pth, but checkpoints alone are no run'):
        load_run('.')
    (tmp_path / 'mmrepro').mkdir()
    (tmp_path / FINGERPRINTS).touch()
    with pytest.raises(RunError, match='fingerprints.rank0.jsonl is empty: the run ended before'):
        load_run('.')


def test_distance_of_weights():
    a = dict(x=torch.tensor([3., 4.]), n=torch.tensor(7), y=torch.tensor([math.nan, 1.]))
    b = dict(x=torch.tensor([0., 0.]), n=torch.tensor(7), y=torch.tensor([math.nan, 1.]))
    row = comparison.distance('epoch_1.pth', 10, a, b)
    assert row.distance == 5. and row.largest == (('x', 1.), )
    assert comparison.distance('', 0, a, a).distance == 0.
    row = comparison.distance('', 0, a, dict(x=torch.zeros(3)))
    assert row.distance == 0. and 'n, y, x' in row.note


def test_the_distance_of_complex_weights_has_both_parts():
    a, b = dict(x=torch.tensor([1 + 2j])), dict(x=torch.tensor([1 + 5j]))
    assert comparison.distance('', 0, a, b).distance == 3.


def test_checkpoints_of_both_runs_are_compared(capsys):
    a, b = pair()
    for path, value in ((a, 1.), (b, 3.)):
        for name in ('epoch_2.pth', 'epoch_10.pth', 'best.pth'):
            save(f'{path}/{name}', w=torch.full((4, ), value))
    comparison = compare(a, b)
    assert [row.name for row in comparison.weights] == ['epoch_2.pth', 'epoch_10.pth']
    assert comparison.weights[0].distance == 4. and comparison.weights[0].iteration == 20
    assert main(a, b) == 1
    out = capsys.readouterr().out
    assert 'DIFFERENT: checkpoints differ' in out and re.search('epoch_10.pth +4 +2 +w 2', out)
    assert compare(a, b, weights=False).equal


def test_plots_report_json_and_exit_codes(tmp_path, capsys):
    out = tmp_path / 'out'
    a, b = pair(b=dict(since=5, noise=1e-6))
    assert main(a, b, '--out', str(out), '--json') == 1
    said = json.loads(capsys.readouterr().out)
    assert said['first']['iteration'] == 5 and said['first']['field'] == 'parameters'
    assert said['losses']['loss']['largest_difference'] > 0
    assert said['exact'] and not said['equal'] and said['common'] == 20
    assert main(a, a, '--json') == 0
    assert json.loads(capsys.readouterr().out)['first'] is None
    names = {f'{name}.png' for name in plots.PLOTS} | {'compare.html', 'compare.json'}
    assert set(os.listdir(out)) == names
    for name in plots.PLOTS:
        assert (out / f'{name}.png').read_bytes().startswith(PNG)
    text = (out / 'compare.html').read_text()
    assert text.count('src="data:image/svg+xml;base64,') == len(plots.PLOTS)
    # nothing is loaded from anywhere
    assert 'http' not in text.replace('data:image', '') and '<script' not in text
    assert '<link' not in text and 'First difference: iteration 5' in text


def test_equal_runs_have_no_plots_of_differences_and_a_plot_repeats():
    comparison = compare(*pair())
    assert plots.parameter_divergence(comparison) is None
    assert plots.weight_distance(comparison) is None
    plot = plots.loss_differences(comparison)
    again = plots.loss_differences(comparison)
    assert plot.startswith(PNG) and plot == again and plot.svg == again.svg
    assert b'<svg' in plot.svg


def test_norms_that_differ_by_no_number_have_no_plot():
    pair(b=dict(since=19))
    path = Path('b', FINGERPRINTS)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    for line in lines:
        if line['kind'] == 'step' and line['iteration'] == 19:
            line['norms'].update((name, 'nan') for name in NAMES if name.startswith('head'))
    path.write_text(''.join(json.dumps(line) + '\n' for line in lines))
    assert plots.parameter_divergence(compare('a', 'b')) is None


def test_without_matplotlib_the_message_says_what_to_install(monkeypatch, capsys, tmp_path):
    monkeypatch.setitem(sys.modules, 'matplotlib', None)
    a, b = pair()
    assert main(a, b) == 0  # the table needs none
    assert main(a, b, '--out', str(tmp_path / 'out')) == 2
    assert 'pip install matplotlib' in capsys.readouterr().err
    assert not list((tmp_path / 'out').iterdir())


def test_harmless_differences_are_counted_and_listed_on_demand(capsys):
    a, b = pair(a=dict(facts={'version.python': '3.11', 'version.mmrepro': '1'}),
                b=dict(facts={'version.python': '3.12', 'version.mmrepro': '2'}))
    assert main(a, b) == 0
    out = capsys.readouterr().out
    assert '2 more differences in settings and environment, all harmless; --all lists them' in out
    assert 'version.python' not in out
    main(a, b, '--all')
    out = capsys.readouterr().out
    assert 'version.python' in out and 'version.mmrepro' in out and 'more diff' not in out


@pytest.mark.parametrize('columns', [None, '60'])
def test_names_are_whole(capsys, monkeypatch, columns):
    name = 'config.model.roi_head.bbox_head.loss_bbox.a_name_that_is_longer_than_the_column'
    monkeypatch.delenv('COLUMNS', raising=False)
    if columns:
        monkeypatch.setenv('COLUMNS', columns)
    main(*pair(a=dict(manifest={name: 1}), b=dict(manifest={name: 2})), '--all')
    out = capsys.readouterr().out
    if columns:  # wrapped: every part of it is somewhere
        assert '…' not in out and max(map(len, out.splitlines())) <= 60
        assert 'config.model' in out and 'column' in out
    else:
        assert name in out


def test_relative_differences():
    assert relative(0., 0.) == 0 and relative(0., 1e-30) == 1 and relative(-1., 1.) == 2
    assert relative(math.inf, math.inf) == 0 and relative(math.nan, 1.) == math.inf


def test_the_iteration_from_which_a_number_is_too_far():
    other = dict(since=7, noise=1e-7, field='losses')
    result = measure(compare(*pair(b=other)), 1e-5)
    loss = next(row for row in result.distances if row.field == 'loss')
    values = ([float.fromhex(step(i, **given)['losses']['loss']) for i in range(20)]
              for given in ({}, other))
    apart = [abs(a - b) / max(abs(a), abs(b)) for a, b in zip(*values)]
    assert loss.relative == max(apart) and loss.at == apart.index(max(apart))
    assert loss.exceeds == next(i for i, distance in enumerate(apart) if distance > 1e-5)
    assert not result.within and f'in iteration {loss.exceeds}' in result.verdict()
    assert any(row.field.startswith('norm of head') for row in result.distances)
    assert any(row.field == 'metric coco/bbox_mAP' for row in result.distances)


def test_exit_codes_and_words_of_a_tolerance(capsys):
    a, b = pair(b=dict(since=7, noise=1e-9))
    assert main(a, b) == 1
    assert main(a, b, '--tolerance', '0.1') == 0
    assert 'WITHIN 0.1' in capsys.readouterr().out
    assert main(a, b, '--tolerance', '1e-12') == 1
    assert 'BEYOND 1e-12' in capsys.readouterr().out
    assert main(a, b, '--tolerance', '0.1', '--json') == 0
    assert json.loads(capsys.readouterr().out)['tolerance']['within']
    for wrong in ('0', '-1', 'nan', 'inf'):
        assert exit_code('compare', a, b, '--tolerance', wrong) == 2
        assert '--tolerance' in capsys.readouterr().err


def test_other_samples_have_no_tolerance(capsys):
    a, b = pair()
    path = Path(b, FINGERPRINTS)
    text = path.read_text()
    assert '"positions": [6, 7]' in text
    path.write_text(text.replace('"positions": [6, 7]', '"positions": [7, 6]'))
    assert main(a, b, '--tolerance', '1') == 1
    assert 'batch.positions differs in iteration 3' in ' '.join(capsys.readouterr().out.split())


OLD = Path(__file__).parent / 'mmdet2'
LOG, TEXT = '20221128_201533.log.json', '20221128_201533.log'
LINES = (OLD / LOG).read_text().splitlines()
HEAD = json.loads(LINES[0])
TRAIN = '''
import sys
from pathlib import Path
import small_runs
from mmengine.runner import Runner
for name, seed, workers in (('a', 3, 0), ('b', None, 1)):
    cfg = small_runs.validating(small_runs.config(Path(name), log_level='INFO'))
    cfg.randomness, cfg.train_dataloader.num_workers = dict(seed=seed), workers
    cfg.default_hooks.logger = dict(type='LoggerHook', interval=1)
    Runner.from_cfg(cfg).train()
assert 'mmrepro' not in sys.modules
'''


def old(name='old', **changes):
    """Copy mmdet2/; in its files, replace text by other text."""
    shutil.copytree(OLD, name)
    # MMDetection writes the config as a file, too; the first line of the log has it
    Path(name, HEAD['exp_name']).write_text(HEAD['config'])
    for path in Path(name).iterdir():
        text = path.read_text()
        for before, after in changes.items():
            text = text.replace(before, after)
        path.write_text(text)
    return name


def old_log(*lines):
    Path(old(), LOG).write_text('\n'.join(lines))


def new(name='new', **changes):
    """Write a run of the config of MMDetection 3.x, after changes of it; its log has no lines."""
    import mmdet
    cfg = Config.fromfile(os.path.join(os.path.dirname(mmdet.__file__), '.mim', 'configs',
                                       'faster_rcnn', 'faster-rcnn_r50_fpn_1x_coco.py'))
    cfg.merge_from_dict(changes)
    return write_log(name, config=cfg.pretty_text)


def differing(a, b):
    return {row.name: (row.then, row.now) for row in compare(a, b).manifest}


# ---------------------------------------------------------------------------- MMEngine


@pytest.fixture(scope='module')
def trained(tmp_path_factory):
    """Train two runs with MMEngine alone; the second draws its seed and has a worker."""
    folder = tmp_path_factory.mktemp('stock')
    python('-c', TRAIN, cwd=folder)
    return folder


def test_a_folder_of_stock_mmengine_has_its_environment_and_the_seed_that_it_drew(trained):
    facts = load_run(str(trained / 'b')).facts
    assert facts['version.torch'] == torch.__version__
    assert facts['hardware.gpu'] is None or torch.cuda.is_available()
    assert facts['world_size'] == 1
    assert facts['randomness.seed'] == load(str(trained / 'b' / 'epoch_2.pth'))['meta']['seed']
    comparison = compare(str(trained / 'a'), str(trained / 'b'))
    assert {row.name: row.severity for row in comparison.manifest} == {
        'randomness.seed': 'changes bits', 'config.train_dataloader.num_workers': 'changes bits'}
    assert [row.name for row in comparison.weights] == ['epoch_1.pth', 'epoch_2.pth']
    assert 'A: not recorded: the version of MMCV, the version of MMDetection' in comparison.notes
    assert any(note.startswith('no log holds initial weights') for note in comparison.notes)


def test_without_log_and_config_the_checkpoint_says_what_it_knows(trained, tmp_path):
    shutil.copytree(trained / 'b', 'c')
    for path in Path('c').glob('*/*.log'):
        path.unlink()
    for path in Path('c').glob('*/vis_data/config.py'):
        path.unlink()
    facts = load_run('c', checkpoints=True).facts
    whole = load_run(str(trained / 'b')).facts
    for name in ('randomness.seed', 'version.mmengine', 'config.train_dataloader.num_workers'):
        assert facts[name] == whole[name]
    assert load_run('c').facts == {}
    note, = (note for note in compare('c', str(trained / 'a')).notes if note.startswith('A: not'))
    assert 'the environment' in note and 'the seed' not in note


def test_checkpoints_of_mmrepro_have_facts_that_no_log_has(trained):
    for name, threads in (('c', 1), ('d', 2)):
        shutil.copytree(trained / 'a', name)
        checkpoint = torch.load(f'{name}/epoch_2.pth', weights_only=False)
        checkpoint['meta']['mmrepro'] = dict(facts={'torch.num_threads': threads})
        torch.save(checkpoint, f'{name}/epoch_2.pth')
    comparison = compare('c', 'd')
    assert [(row.name, row.severity) for row in comparison.manifest] == [
        ('torch.num_threads', 'changes bits')]
    assert any(note.startswith('initial weights and changes of the code were not recorded')
               for note in comparison.notes)


def test_a_checkpoint_of_another_training_is_said(trained):
    shutil.copytree(trained / 'a', 'c')
    shutil.copy(trained / 'b' / 'epoch_2.pth', 'c')
    os.utime('c/epoch_2.pth')
    assert any('they are of two trainings' in note
               for note in load_run('c', checkpoints=True).notes)


def test_other_versions_of_the_environment_change_bits(trained):
    shutil.copytree(trained / 'a', 'c')
    log, = Path('c').glob('*/*.log')
    log.write_text(log.read_text().replace(f'PyTorch: {torch.__version__}', 'PyTorch: 1.13.1')
                   .replace('OpenCV: ', 'OpenCV: 1'))
    rows = compare(str(trained / 'a'), 'c').manifest
    assert [(row.name, row.severity) for row in rows] == [
        ('version.cv2', 'changes bits'), ('version.torch', 'changes bits')]


def test_metrics_count_where_nothing_else_differs(capsys):
    assert main(write_log('a', val=.3), write_log('b', val=.32)) == 1
    out = capsys.readouterr().out
    assert 'DIFFERENT: step 1, metric coco/bbox_mAP: 0.3 and 0.32' in out and 'Metrics' in out


def test_the_metric_that_differs_first_is_named_whatever_the_order_of_names():
    for name, later, first in (('a', .3, .1), ('b', .4, .2)):
        write_log(name, val=.3)
        with open(Path(name, '20260101_000000', 'vis_data', 'scalars.json'), 'a') as file:
            file.writelines(json.dumps(row) + '\n' for row in (
                {'coco/AR': first, 'step': 2}, {'coco/bbox_mAP': later, 'step': 3}))
    assert compare('a', 'b').metric.text() == 'iteration 2, metric coco/AR: 0.1 and 0.2'


# ---------------------------------------------------------------------------- MMDetection 2.x


def test_a_folder_of_mmdetection_2_is_a_run():
    run = load_run(str(OLD))
    assert run.kind == 'mmcv log' and run.notes == []
    # iteration 3000 of the second of 12 epochs with 7330 iterations, counted from 0
    assert run.iterations[2] == 7330 + 2999 and len(run.iterations) == 24
    assert run.scalars[7330 + 2999]['loss'] == .68718
    assert list(run.logged_vals) == [*range(1, 13)]
    assert run.logged_vals[12]['coco/bbox_mAP'] == .372
    assert {name: run.facts[name] for name in run.facts if not name.startswith('config.')} == {
        'version.python': '3.8.13', 'version.torch': '1.9.0+cu111',
        'version.torchvision': '0.10.0+cu111', 'version.cuda': '11.1', 'version.cudnn': '8.0.5',
        'version.cv2': '4.6.0', 'version.mmcv': '1.7.0', 'version.mmdet': '2.28.2',
        'operators.compiler': 'GCC 7.3', 'operators.cuda': '11.1',
        'hardware.gpu': 'Tesla V100-SXM2-32GB', 'hardware.cpu_instructions': 'AVX2',
        'world_size': 8, 'torch.backends.cudnn.benchmark': False,
        'randomness.seed': 1508717637, 'randomness.deterministic': False}


def test_the_log_in_json_alone_is_a_run():
    shutil.copy(OLD / LOG, '.')
    run, whole = load_run(LOG), load_run(str(OLD))
    deterministic = {'randomness.deterministic': False}  # it is in the text log only
    assert {**run.facts, **deterministic} == whole.facts
    assert run.notes == [f'{LOG[:-5]} is missing: iterations are counted as if an epoch had 6000, '
                         'the last that was logged']
    assert run.logged_vals == whole.logged_vals and len(run.scalars) == 24
    assert compare(LOG, '.').equal


def test_iterations_of_an_iteration_based_run_count_on():
    rows = [dict(mode='train', epoch=1 + i // 70, iter=i, lr=.1, loss=1. / i)
            for i in range(50, 200, 50)]
    rows.insert(2, dict(mode='val', epoch=1, iter=5000, lr=.1, mAP=.5))
    Path('a').mkdir()
    head = dict(config="runner = dict(type='IterBasedRunner', max_iters=150)\ndata = dict(x=1)\n")
    Path('a', LOG).write_text(''.join(json.dumps(row) + '\n' for row in (head, *rows)))
    Path('a', TEXT).write_text('Iter [50/150]\tlr: 1.000e-01')
    run = load_run('a')
    assert run.iterations == [49, 99, 149] and run.logged_vals == {100: {'mAP': .5}}
    Path('a', TEXT).unlink()
    assert load_run('a').scalars == run.scalars


def test_the_same_training_in_both_dialects_differs_in_nothing_that_decides():
    comparison = compare(old(), new())
    assert comparison.manifest == []
    alone = [note for note in comparison.notes if 'without a counterpart' in note]
    assert len(alone) == 2 and all(len(note) < 400 for note in alone)


def test_what_decides_a_result_is_compared_across_dialects():
    rows = differing(old(**{'lr=0.02': 'lr=0.01', '1333,': '1000,'}), new(**{
        'train_dataloader.batch_size': 4, 'train_dataloader.num_workers': 4,
        'train_cfg.max_epochs': 24, 'param_scheduler.1.milestones': [16, 22],
        'param_scheduler.0.end': 1000, 'model.data_preprocessor.mean': [0, 0, 0],
        'model.roi_head.bbox_head.num_classes': 3, 'optim_wrapper.optimizer.weight_decay': .05,
        'model.rpn_head.loss_bbox.loss_weight': 2.}))
    dataloader = 'config.train_dataloader'
    assert rows == {
        f'{dataloader}.batch_size': (2, 4), f'{dataloader}.num_workers': (2, 4),
        f'{dataloader}.dataset.pipeline.Resize.scale': ('[1000, 800]', '[1333, 800]'),
        'config.train_cfg.max_epochs': (12, 24),
        'config.param_scheduler.MultiStepLR.milestones': ('[8, 11]', '[16, 22]'),
        'config.param_scheduler.LinearLR.end': (500, 1000),
        'config.model.data_preprocessor.mean': ('[123.675, 116.28, 103.53]', '[0, 0, 0]'),
        'config.model.roi_head.bbox_head.num_classes': (80, 3),
        'config.model.rpn_head.loss_bbox.loss_weight': (1.0, 2.0),
        'config.optim_wrapper.optimizer.lr': (.01, .02),
        'config.optim_wrapper.optimizer.weight_decay': (.0001, .05)}


def test_multi_scale_training_is_compared_across_dialects():
    scales = 'img_scale=[(1333, 640), (1333, 800)], multiscale_mode="value"'
    config = re.sub(r'img_scale=\([^)]*\)', scales, HEAD['config'])
    old_log(json.dumps(dict(HEAD, config=config)), *LINES[1:])
    cfg = Config.fromfile(new() + '/20260101_000000/vis_data/config.py')
    cfg.train_dataloader.dataset.pipeline[2] = dict(
        type='RandomChoiceResize', scales=[(1333, 640), (1333, 720)], keep_ratio=True)
    write_log('new', config=cfg.pretty_text)
    assert differing('old', 'new') == {
        'config.train_dataloader.dataset.pipeline.Resize.scale[1]': ('[1333, 800]', '[1333, 720]')}


def test_two_runs_of_mmdetection_2_are_compared_by_all_settings(capsys):
    changes = {'1508717637': '7', 'samples_per_gpu=2': 'samples_per_gpu=4', 'V100': 'A100',
               'CuDNN 8.0.5': 'CuDNN 8.2.0', 'range(0, 8)': 'range(0, 4)',
               'deterministic: False': 'deterministic: True', 'interval=3000': 'interval=30',
               'auto_resume = False': 'cudnn_benchmark = True',
               # a file that has moved may hold other data: a stock run has no digest of it
               'annotations/instances_train2017.json': 'annotations/mine.json'}
    rows = compare(str(OLD), old(**changes)).manifest
    assert {row.name for row in rows if row.severity == 'changes bits'} == {
        'randomness.seed', 'randomness.deterministic', 'hardware.gpu', 'version.cudnn',
        'torch.backends.cudnn.benchmark', 'world_size', 'config.train_dataloader.batch_size',
        'config.train_dataloader.dataset.ann_file'}
    assert [row.name for row in rows if row.severity == 'harmless'] == [
        'config.auto_resume', 'config.default_hooks.logger.interval',
        'config.env_cfg.cudnn_benchmark', 'config.gpu_ids']
    assert main(str(OLD), 'old') == 0  # the numbers are the same
    assert 'SAME LOGS: 24 iterations' in capsys.readouterr().out


def test_a_run_without_a_seed_is_said():
    name = old(**{'Set random seed to 1508717637': 'No seed', '"seed": 1508717637': '"seed": null'})
    assert 'B: not recorded: the seed' in compare(str(OLD), name).notes


def test_without_a_config_in_the_log_the_file_beside_it_counts():
    head = {name: value for name, value in HEAD.items() if name != 'config'}
    old_log(json.dumps(head), *LINES[1:])
    assert load_run('old').facts == load_run(str(OLD)).facts


def test_a_resumed_run_of_mmcv_goes_on_in_its_second_log():
    old_log(*LINES[:20])
    Path('old', '20221129_080000.log.json').write_text('\n'.join([LINES[0], *LINES[16:]]))
    shutil.copy(OLD / TEXT, 'old/20221129_080000.log')
    run, whole = load_run('old'), load_run(str(OLD))
    assert run.starts == 2 and run.scalars == whole.scalars
    assert run.logged_vals == whole.logged_vals


def test_the_checkpoint_of_mmcv_says_what_its_log_lost():
    Path('a').mkdir()
    Path('a', LOG).write_text('\n'.join(LINES[1:]))
    torch.save(dict(meta=dict(HEAD, epoch=12, iter=87960, mmcv_version='1.7.0', CLASSES=('a', )),
                    state_dict=dict(w=torch.ones(2))), 'a/epoch_12.pth')
    shutil.copytree('a', 'b')
    facts = load_run('a', checkpoints=True).facts
    assert facts['randomness.seed'] == 1508717637 and facts['hardware.gpu'].startswith('Tesla')
    assert facts['config.train_dataloader.batch_size'] == 2
    assert 'the weights in 1 of 1 checkpoint have the same bits' in compare('a', 'b').verdict()


@pytest.mark.parametrize('number, line, problem', [
    (1, '{"env_info": "sys', 'not JSON'), (4, '{"mode": "train", ', 'not JSON'),
    (5, '[1, 2]', 'it is [1, 2]; allowed: dict'),
    (6, '{"mode": "train", "epoch": "x", "iter": 1}', "epoch is 'x'; allowed: int")])
def test_a_damaged_line_of_mmcv_is_an_error_with_file_and_line(number, line, problem, capsys):
    old_log(*LINES[:number - 1], line, *LINES[number:])
    with pytest.raises(RunError, match=f'old/{LOG}, line {number}'):
        load_run('old')
    assert main('old', str(OLD)) == 2
    error = capsys.readouterr().err.splitlines()
    assert len(error) == 1 and problem in error[0]


def test_damage_beside_the_log_is_a_note_and_the_rest_is_compared():
    name = old()
    Path(name, TEXT).write_bytes(bytes(range(256)) * 100 + b'\nSet random seed to ' + b'9' * 5000)
    path = Path(name, LOG)
    text = path.read_text()
    path.write_text(text.replace('model = dict(', 'model = = dict(', 1) + '{"mode": "tr')
    torch.save(dict(meta=dict(seed=1508717637), state_dict={}), 'old/epoch_12.pth')
    whole = Path(name, 'epoch_12.pth').read_bytes()
    Path(name, 'epoch_12.pth').write_bytes(whole[:len(whole) // 2])
    run = load_run(name, checkpoints=True)
    assert len(run.scalars) == 24 and run.facts['randomness.seed'] == 1508717637
    assert run.facts['version.torch'] == '1.9.0+cu111' and run.old
    for what in ('line 38: torn off', 'line 1: not read: not the text of a config',
                 'epoch_12.pth: checkpoint old/epoch_12.pth is truncated'):
        assert any(what in note and '\n' not in note for note in run.notes), what


def with_metrics(name, **metrics):
    write_run(name)
    file = Path(name, 'mmrepro', 'fingerprints.rank0.jsonl')
    lines = [json.dumps(dict(kind='val', iteration=iteration, epoch=0, metrics={
        key: float(value).hex() for key, value in metrics.items()})) for iteration in (10, 20)]
    file.write_text(file.read_text() + ''.join(f'{line}\n' for line in lines))
    return name


def test_a_metric_that_one_run_has_alone_is_a_row():
    comparison = compare(with_metrics('a', mAP=.5, mAR=.25), with_metrics('b', mAP=.5, AP75=.125))
    table, = (table for table in report_of(comparison).tables if table.title == 'Metrics')
    assert table.rows == [('mAP', '20', '0.5', '0.5', '0'),
                          ('mAR', '-', '0.25', '-', 'A only, step 20'),
                          ('AP75', '-', '-', '0.125', 'B only, step 20')]


def test_metrics_of_objects_that_there_are_none_of_are_left_out():
    """COCO's API gives -1 for them."""
    comparison = compare(with_metrics('a', mAP=.5, mAP_l=-1), with_metrics('b', mAP=.25, mAP_l=-1))
    table, = (table for table in report_of(comparison).tables if table.title == 'Metrics')
    assert [row[0] for row in table.rows] == ['mAP']
    assert b'mAP' in plots.metrics(comparison).svg
    none = compare(with_metrics('c', mAP_l=-1), with_metrics('d', mAP_l=-1))
    assert plots.metrics(none) is None


def test_a_logarithmic_axis_has_plain_numbers():
    from mmrepro.report.plots import figure, plain_log
    with figure() as (fig, axes):
        axes.plot([1, 2], [28.15, 29.5])
        axes.set_yscale('log')
        plain_log(axes.yaxis)
        fig.canvas.draw()
        texts = [label.get_text() for label in axes.yaxis.get_ticklabels(which='both')]
    assert any(texts) and all(float(text) for text in texts if text)


def test_facts_that_may_change_bits_are_in_the_verdict_where_nothing_else_differs():
    def verdict(facts_a, facts_b, **b):
        comparison = compare(*pair(a=dict(facts=facts_a), b=dict(facts=facts_b, **b)))
        return comparison.verdict()

    seed = {'randomness.seed': 1, 'source.mmrepro': '0'}
    edited = {'source.own/transform.py': 'one', 'version.timm': '1'}
    other = {'source.own/transform.py': 'two', 'version.timm': '2'}
    cause = ('what else differs, and may be the cause: edited code: own/transform.py, '
             "version.timm '1' -> '2'")
    assert cause in verdict({**seed, **edited}, {**seed, **other}, since=7)
    # equal runs need no cause, and one that is known to change bits is advice of its own
    assert 'may be the cause' not in verdict({**seed, **edited}, {**seed, **other})
    seeded = {**seed, 'randomness.seed': 2, **other}
    assert 'may be the cause' not in verdict({**seed, **edited}, seeded, since=7)


def test_what_a_run_was_resumed_with_is_known_from_its_checkpoint(trained):
    """Its last start has the code of the other run; the history says that its first had not."""
    history = 'resumed at iteration 36 with edited code: own/transform.py'
    for name, run, facts in (('c', 'a', dict(history=history)), ('d', 'b', {})):
        shutil.copytree(trained / run, name)
        checkpoint = torch.load(f'{name}/epoch_2.pth', weights_only=False)
        checkpoint['meta']['mmrepro'] = dict(facts={'source.mmrepro': '0', **facts})
        torch.save(checkpoint, f'{name}/epoch_2.pth')
    comparison = compare('c', 'd')
    assert 'history' in [row.name for row in comparison.manifest]
    assert f'A was {history}' in doubts(comparison.manifest)
