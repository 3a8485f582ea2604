"""Trainings without mmrepro: of stock MMEngine, and of MMDetection 2.x, whose files mmdet2/ has.

The files in mmdet2/ are in the format of MMDetection 2.28 and mmcv 1.7, with a log line every 3,000
iterations: the config is that of MMDetection 2.28, the environment and numbers are made up.
"""
import json
import os
import re
import shutil
from pathlib import Path

import pytest
import torch
from fake_runs import write_log
from harness import python
from mmengine.config import Config

from mmrepro import cli
from mmrepro.checkpoint.files import load
from mmrepro.errors import RunError
from mmrepro.report.comparison import compare_paths as compare
from mmrepro.report.run_view import load_run

OLD = Path(__file__).parent / 'mmdet2'
LOG, TEXT = '20221128_201533.log.json', '20221128_201533.log'
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


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def old(name='old', **changes):
    """Copy mmdet2/; in its files, replace text by other text."""
    shutil.copytree(OLD, name)
    # MMDetection writes the config as a file, too; the first line of the log has it
    head = json.loads((OLD / LOG).read_text().splitlines()[0])
    Path(name, head['exp_name']).write_text(head['config'])
    for path in Path(name).iterdir():
        text = path.read_text()
        for before, after in changes.items():
            text = text.replace(before, after)
        path.write_text(text)
    return name


def new(name='new', **changes):
    """Write a run of the config of MMDetection 3.x, after changes of it; its log has no lines."""
    mmdet = pytest.importorskip('mmdet')
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
    write_log('a', val=.3)
    write_log('b', val=.32)
    assert cli.main(['compare', 'a', 'b']) == 1
    out = capsys.readouterr().out
    assert 'DIFFERENT: step 1, metric coco/bbox_mAP: 0.3 and 0.32' in out and 'Metrics' in out


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
    path = Path(old(), LOG)
    head, *rows = path.read_text().splitlines()
    head = json.loads(head)
    head['config'] = re.sub(r'img_scale=\([^)]*\)', scales, head['config'])
    path.write_text('\n'.join([json.dumps(head), *rows]))
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
               'auto_resume = False': 'cudnn_benchmark = True'}
    rows = compare(str(OLD), old(**changes)).manifest
    assert {row.name for row in rows if row.severity == 'changes bits'} == {
        'randomness.seed', 'randomness.deterministic', 'hardware.gpu', 'version.cudnn',
        'torch.backends.cudnn.benchmark', 'world_size', 'config.train_dataloader.batch_size'}
    assert [row.name for row in rows if row.severity == 'harmless'] == [
        'config.auto_resume', 'config.default_hooks.logger.interval',
        'config.env_cfg.cudnn_benchmark', 'config.gpu_ids']
    assert cli.main(['compare', str(OLD), 'old']) == 0  # the numbers are the same
    assert 'SAME LOGS: 24 iterations' in capsys.readouterr().out


def test_a_moved_annotation_file_of_a_stock_run_may_hold_other_data():
    changes = {'annotations/instances_train2017.json': 'annotations/mine.json'}
    row, = compare(str(OLD), old(**changes)).manifest
    assert (row.name, row.severity) == ('config.train_dataloader.dataset.ann_file', 'changes bits')


def test_a_run_without_a_seed_is_said():
    name = old(**{'Set random seed to 1508717637': 'No seed', '"seed": 1508717637': '"seed": null'})
    assert 'B: not recorded: the seed' in compare(str(OLD), name).notes


def test_without_a_config_in_the_log_the_file_beside_it_counts():
    lines = (OLD / LOG).read_text().splitlines()
    head = {name: value for name, value in json.loads(lines[0]).items() if name != 'config'}
    Path(old(), LOG).write_text('\n'.join([json.dumps(head), *lines[1:]]))
    assert load_run('old').facts == load_run(str(OLD)).facts


def test_a_resumed_run_of_mmcv_goes_on_in_its_second_log():
    lines = (OLD / LOG).read_text().splitlines()
    Path(old(), LOG).write_text('\n'.join(lines[:20]))
    Path('old', '20221129_080000.log.json').write_text('\n'.join([lines[0], *lines[16:]]))
    shutil.copy(OLD / TEXT, 'old/20221129_080000.log')
    run, whole = load_run('old'), load_run(str(OLD))
    assert run.starts == 2 and run.scalars == whole.scalars
    assert run.logged_vals == whole.logged_vals


def test_the_checkpoint_of_mmcv_says_what_its_log_lost():
    head = json.loads((OLD / LOG).read_text().splitlines()[0])
    Path('a').mkdir()
    Path('a', LOG).write_text('\n'.join((OLD / LOG).read_text().splitlines()[1:]))
    torch.save(dict(meta=dict(head, epoch=12, iter=87960, mmcv_version='1.7.0', CLASSES=('a', )),
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
    lines = (OLD / LOG).read_text().splitlines()
    path = Path(old(), LOG)
    path.write_text('\n'.join([*lines[:number - 1], line, *lines[number:]]))
    with pytest.raises(RunError, match=f'old/{LOG}, line {number}'):
        load_run('old')
    assert cli.main(['compare', 'old', str(OLD)]) == 2
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
