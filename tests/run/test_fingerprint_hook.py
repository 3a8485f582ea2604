"""FingerprintHook and trackers: what they write of a run; they leave no trace in its bits."""
import json
import logging
import os

import numpy as np
import pytest
import torch
from demo_runs import narrow, small
from harness import Child, train
from mmengine.registry import METRICS, MODELS
from mmengine.runner import Runner
from mmengine.visualization import LocalVisBackend
from small_runs import (
    DumpNothing,
    NoisyLine,
    RampedAverage,
    config,
    hook_with,
    small_run,
    trained_runner,
    validating,
    weights_of,
)

from mmrepro.distributed.unwrap import held_averages
from mmrepro.fingerprint.digest import named_averages, tensor_digest, to_hex, value_digest
from mmrepro.fingerprint.reader import read_run
from mmrepro.objects.digests import state_digest
from mmrepro.run import identity
from mmrepro.run.hooks import FingerprintHook

STATES = ('gradients', 'parameters', 'buffers', 'optimizer', 'averages')


def hook(**arguments):
    return dict(type='FingerprintHook', **arguments)


def lines(work_dir):
    with open(os.path.join(work_dir, 'mmrepro', 'fingerprints.rank0.jsonl')) as file:
        return [json.loads(line) for line in file]


def trained(work_dir, **change):
    cfg = config(work_dir)
    cfg.merge_from_dict(change)
    runner = trained_runner(cfg)
    return runner.model.line.weight.detach().numpy().tobytes(), torch.rand(4).tolist()


@pytest.fixture(scope='module')
def runs(tmp_path_factory):
    root = tmp_path_factory.mktemp('runs')
    momentum = dict(optimizer=dict(type='SGD', lr=0.1, momentum=0.9))
    changes = dict(
        none={}, step=dict(custom_hooks=[hook()]),
        parameter=dict(custom_hooks=[hook(level='parameter')], optim_wrapper=momentum),
        module=dict(custom_hooks=[hook(level='module')]),
        operator=dict(custom_hooks=[hook(level='operator')]),
        interval=dict(custom_hooks=[hook(interval=3)]),
        adam=dict(custom_hooks=[hook(level='parameter')],
                  optim_wrapper=dict(optimizer=dict(type='AdamW', lr=0.1),
                                     clip_grad=dict(max_norm=0.01))),
        gathered=dict(custom_hooks=[hook()],
                      optim_wrapper=dict(optimizer=dict(type='SGD', lr=0.1),
                                         accumulative_counts=2)),
        stock_streams=dict(custom_hooks=[hook()],
                           randomness=dict(seed=3, worker_seed='mmengine')))
    found = Child(lambda: {name: trained(root / name, **change)
                           for name, change in changes.items()}).result()
    return {name: (str(root / name), result) for name, result in found.items()}


def test_one_line_an_iteration(runs):
    start, *steps, end = lines(runs['step'][0])
    assert {key: start[key] for key in ('kind', 'format', 'level', 'interval', 'rank', 'scheme',
                                        'world_size', 'iteration', 'manifest')} == dict(
        kind='start', format=1, level='step', interval=1, rank=0, scheme=1, world_size=1,
        iteration=0, manifest='manifest.json')
    assert end == dict(kind='end', iteration=8, self_checks=dict(samples=5, steps=4))
    assert [(s['iteration'], s['epoch']) for s in steps] == [(i, i // 4) for i in range(8)]
    for step in steps:
        assert float.fromhex(step['losses']['loss']) > 0
        assert step['lr'] == {'lr': [(0.1).hex()]}
        assert all(len(step[key]) == 16 for key in STATES)
        assert len(step['batch']['data']) == 16
    assert [s['batch']['positions'] for s in steps[:4]] == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert sorted(i for s in steps[:4] for i in s['batch']['indices']) == list(range(8))
    assert len({s['parameters'] for s in steps}) == 8
    assert len({s['batch']['data'] for s in steps}) == 8


def test_digests_are_of_the_state_after_the_step(runs):
    folder, (weight, _) = runs['parameter']
    last = lines(folder)[-2]
    expected = to_hex([tensor_digest(torch.from_numpy(np.frombuffer(weight, np.float32).copy()
                                                      ).view(1, 2))])[0]
    assert last['by_name']['parameters']['line.weight'] == expected


@pytest.mark.parametrize('level', ['step', 'module', 'operator'])
def test_the_training_is_the_same_bits_and_levels_agree_on_what_they_share(runs, level):
    assert runs[level][1] == runs['none'][1]
    for a, b in zip(lines(runs['step'][0])[1:-1], lines(runs[level][0])[1:-1]):
        assert {key: b[key] for key in a} == a


def test_parameter_level_names_everything(runs):
    step = lines(runs['parameter'][0])[1]
    names = {'line.weight', 'line.bias'}
    assert set(step['by_name']['parameters']) == set(step['by_name']['gradients']) == names
    assert set(step['norms']) == names and float.fromhex(step['norms']['line.weight']) > 0
    assert set(step['by_name']['optimizer']) == {f'{name}.momentum_buffer' for name in names}
    adam = lines(runs['adam'][0])
    assert {'line.bias.step', 'line.weight.exp_avg'} <= set(adam[1]['by_name']['optimizer'])
    steps = [line['by_name']['optimizer']['line.bias.step'] for line in adam[1:-1]]
    assert len(set(steps)) == 8


@MODELS.register_module(force=True)
class HoldsAModule(NoisyLine):
    """A part is called as that of a wrapper for several ranks is."""

    def __init__(self):
        super().__init__()
        self.module = torch.nn.Linear(1, 1)

    def forward(self, x, mode='tensor'):
        outputs = super().forward(x, mode)
        return {name: self.module(loss.view(1)).sum() for name, loss in outputs.items()}


def test_a_model_may_call_a_part_module(tmp_path):
    Runner.from_cfg(small_run(tmp_path, model=dict(type='HoldsAModule'), custom_hooks=[
        dict(type='FingerprintHook', level='parameter')])).train()
    assert set(lines(str(tmp_path))[1]['by_name']['parameters']) == {
        'line.weight', 'line.bias', 'module.weight', 'module.bias'}


def test_module_level_has_all_calls_in_order(runs):
    modules = lines(runs['module'][0])[1]['modules']
    assert [record[:3] for record in modules] == [
        ['data_preprocessor', 'forward', 0], ['(model)', 'forward', 0], ['line', 'forward', 0],
        ['line', 'backward', 0]]
    assert all(len(digest) == 16 for digest in (*modules[2][3:], modules[3][3]))
    # points need no gradient, and that of the weight is not the layer's output
    assert modules[3][4] is None
    assert modules[2][3] != modules[2][4]


def test_operator_level_has_the_operators_of_all_phases(runs):
    for line in lines(runs['operator'][0])[1:-1]:
        records = line['operators']
        phases = {record[0] for record in records}
        assert {'forward', 'backward', 'optimizer'} <= phases
        (linear, ) = [r for r in records if r[:3] == ['forward', 'line', 'aten.addmm.default']]
        assert len(linear[4]) == len(linear[5]) == 16 and linear[3] == 0 and '[2,2]' in linear[6]
    first, second = (lines(runs['operator'][0])[i]['operators'] for i in (1, 2))
    assert [r[:4] for r in first] == [r[:4] for r in second] and first != second


@METRICS.register_module(force=True)
class ByClass(DumpNothing):
    def compute_metrics(self, results):
        return dict(mean=0.5, by_class=np.array([0.25, 0.75]), one=np.array(0.5), name='a')


def test_metrics_that_are_no_numbers_are_left_out(tmp_path):
    trained_runner(validating(config(tmp_path, custom_hooks=[hook()]), 'ByClass'))
    found = [line['metrics'] for line in lines(tmp_path) if line['kind'] == 'val']
    assert found == [dict(mean=0.5.hex(), one=0.5.hex())] * 2


def test_an_interval(runs):
    folder, result = runs['interval']
    assert result == runs['none'][1]
    full = {line['iteration']: line for line in lines(runs['step'][0])[1:-1]}
    assert [line for line in lines(folder)[1:-1]] == [full[i] for i in (0, 3, 6)]


def test_no_hook_of_torch_outlives_the_training(tmp_path):
    def hooks_of_torch():
        runner = Runner.from_cfg(config(tmp_path, custom_hooks=[hook(level='module')]))
        runner.train()
        return [*runner.optim_wrapper.optimizer._optimizer_step_pre_hooks,
                *(key for module in runner.model.modules() for key in module._forward_pre_hooks)]

    assert Child(hooks_of_torch).result() == []


def test_gradients_that_are_gathered_are_seen_before_and_at_the_step(runs):
    steps = lines(runs['gathered'][0])[1:-1]
    assert len({step['gradients'] for step in steps}) == 8
    assert [a['parameters'] == b['parameters'] for a, b in zip(steps, steps[1:])] == [
        False, True, False, True, False, True, False]


def test_streams_of_stock_mmengine_have_no_positions(runs):
    assert all(step['batch']['positions'] is None and step['batch']['data']
               for step in lines(runs['stock_streams'][0])[1:-1])


def averaging(folder, priority):
    """Train with an average; return lines, and at each save the line that was the last then."""
    def job():
        cfg = small_run(folder, custom_hooks=[
            hook(level='parameter'), dict(type='EMAHook', ema_type='RampedAverage',
                                          priority=priority)])
        trained_runner(cfg, hook_with(before_save_checkpoint=lambda runner, checkpoint: last.append(
            lines(folder)[-1].get('iteration'))))
        return last
    last = []
    return Child(job).result(), lines(folder)[1:-1]


@pytest.mark.parametrize('priority', ['NORMAL', 'LOW', 'HIGHEST'])
def test_averages_are_those_of_the_checkpoint_that_follows_the_line(tmp_path, priority):
    at_saves, steps = averaging(tmp_path / 'run', priority)
    assert at_saves == [*range(8)]
    path = 'EMAHook.ema_model'
    for i, step in enumerate(steps):
        found = step['by_name']['averages']
        saved = torch.load(tmp_path / 'run' / f'iter_{i + 1}.pth', weights_only=False)
        expected = {f'{path}.{name}': value for name, value in saved['state_dict'].items()}
        expected |= {f'{path}:steps': torch.tensor(i + 1)}
        values = dict(updates=i + 1, interval=1, update_buffers=False)
        expected |= {f'{path}:{name}': value_digest(value) for name, value in values.items()}
        assert found == {name: to_hex([tensor_digest(value)])[0]
                         for name, value in expected.items()}
    assert len({step['averages'] for step in steps}) == 8


def test_hooks_with_averages_in_lists_dicts_and_more_than_one(tmp_path):
    def names():
        held = hook_with()
        held.several, held.by_name = [averages[0], averages[1]], dict(slow=averages[2])
        held.again = averages[0]
        more = hook_with()
        more.average = averages[3]
        return {*held_averages([held, hook_with(), more])}
    averages = [RampedAverage(torch.nn.Linear(1, 1)) for _ in range(4)]
    assert names() == {'Hook.several.0', 'Hook.several.1', 'Hook.by_name.slow', 'Hook#2.average'}


def test_any_plain_attribute_of_an_average_counts():
    from collections import deque
    held = hook_with()
    held.average = average = RampedAverage(torch.nn.Linear(1, 1))

    def digests():
        return dict(zip(*(zip(*((name, to_hex([tensor_digest(value)])[0])
                                for name, value in named_averages([held]))))))

    before = digests()
    for name, first, second in (
            ('window', deque([1., 2.]), deque([1., 2.5])), ('text', 'a', 'b'),
            ('array', np.zeros(2), np.ones(2)), ('tensors', {'a': [torch.zeros(1)]},
                                                 {'a': [torch.ones(1)]})):
        setattr(average, name, first)
        with_first = digests()
        setattr(average, name, second)
        changed = {key for key, value in digests().items() if with_first[key] != value}
        assert changed == {f'Hook.average:{name}'}
        delattr(average, name)
    average.other = held  # no data
    assert digests() == before


@pytest.mark.parametrize(('arguments', 'message'), [
    (dict(interval=0), 'interval=0 is not allowed'), (dict(interval=True), 'interval=True')])
def test_wrong_arguments(arguments, message):
    with pytest.raises(ValueError, match=message):
        FingerprintHook(**arguments)


def test_a_detectors_lines(data_root, tmp_path):
    """Of two iterations of Faster R-CNN and a validation."""
    cfg = small('faster-rcnn_r50_fpn', data_root)
    narrow(cfg)
    cfg.train_cfg.max_epochs = 1
    cfg.train_dataloader.dataset.indices = 4
    cfg.custom_hooks = [hook(level='module')]
    losses = Child(train, cfg, tmp_path, False).result()['loss']
    log = read_run(str(tmp_path)).ranks[0]
    assert [step['losses'] for step in log.steps.values()] == losses
    (val, ) = log.vals
    assert val['iteration'] == 2 and 'coco/bbox_mAP' in val['metrics']
    modules = log.steps[0]['modules']
    forward = {record[0] for record in modules if record[1] == 'forward'}
    backward = {record[0] for record in modules if record[1] == 'backward'}
    assert {'backbone.layer4.2.conv3', 'backbone.layer2.0', 'neck.fpn_convs.0.conv',
            'rpn_head.rpn_cls', 'roi_head.bbox_head.fc_cls'} <= forward
    # the first stage is frozen, so that no gradient reaches its layers
    assert {'backbone.layer4.2.conv3', 'backbone.layer2.0.bn1', 'backbone.layer2.0.relu',
            'neck.fpn_convs.0.conv', 'rpn_head.rpn_cls', 'roi_head.bbox_head.fc_cls'} <= backward
    assert not any(path.startswith('backbone.layer1') for path in backward)
    # below the first layer that is trained nobody asks for a gradient
    assert {record[0] for record in modules if record[1] == 'backward' and not record[4]} <= {
        'backbone.layer2.0.conv1', 'backbone.layer2.0.downsample.0', 'neck.lateral_convs.0.conv'}
    assert all(record[3] for record in modules if record[1] == 'backward')


def tracked(folder, *backends, read=lambda runner: None):
    """Train in a process of its own; return the weights and what ``read`` finds at the end."""
    def job():
        os.chdir(folder)
        for name, value in dict(WANDB_MODE='offline', WANDB_SILENT='true',
                                MLFLOW_ALLOW_FILE_STORE='true').items():
            os.environ[name] = value
        cfg = config(folder, randomness=dict(seed=3, deterministic=True),
                     custom_hooks=[dict(type='FingerprintHook')])
        cfg.visualizer = dict(type='Visualizer', vis_backends=list(backends))
        runner = Runner.from_cfg(cfg)
        found = []
        close = runner.visualizer.close
        # before the packages end their runs
        runner.visualizer.close = lambda: (found.append(read(runner)), close())
        runner.train()
        digest = state_digest(runner.model.state_dict())
        return weights_of(runner), digest, (found or [read(runner)])[0]

    folder.mkdir()
    return Child(job).result()


def backend(kind, folder, **more):
    return dict(type=kind, save_dir=str(folder / 'tracked'), **more)


def test_tensorboard_gets_seed_facts_digests_checks_and_the_manifest(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    plain, digest, _ = tracked(tmp_path / 'plain')
    folder = tmp_path / 'run'
    weights, same, _ = tracked(folder, backend('TensorboardVisBackend', folder))
    assert weights == plain and same == digest  # bit for bit
    events = EventAccumulator(str(folder / 'tracked'))
    events.Reload()

    def text(name):
        event = events.Tensors(f'mmrepro/{name}/text_summary')[-1]
        return event.tensor_proto.string_val[0].decode()

    assert text('randomness.seed') == '3' and text('randomness.deterministic') == 'True'
    assert text('weights/last') == text('weights/iter_8') == digest[:16] != text('weights/iter_4')
    assert int(text('repeated/steps')) > 0 and int(text('repeated/samples')) > 0
    manifest = json.loads((folder / 'mmrepro' / 'manifest.json').read_text())
    assert json.loads(text('manifest.json')) == manifest and manifest['self_checks']
    names = {tag.split('/')[1] for tag in events.Tags()['tensors'] if tag.startswith('mmrepro/')}
    assert 'version.torch' in names and not any(name.startswith('config.') for name in names)


def test_mlflow_gets_params_tags_and_the_manifest(tmp_path):
    mlflow = pytest.importorskip('mlflow')
    folder = tmp_path / 'run'

    def read(runner):
        run = mlflow.get_run(mlflow.active_run().info.run_id)
        return run.data.params, run.data.tags, run.info.artifact_uri

    _, digest, (params, tags, artifacts) = tracked(
        folder, backend('MLflowVisBackend', folder), read=read)
    assert params['mmrepro/randomness.seed'] == '3'
    assert tags['mmrepro/weights/last'] == digest[:16] and 'mmrepro/repeated/steps' in tags
    with open(os.path.join(artifacts.replace('file://', ''), 'manifest.json'), 'rb') as file:
        assert file.read() == (folder / 'mmrepro' / 'manifest.json').read_bytes()


def test_wandb_gets_config_summary_and_the_manifest(tmp_path):
    wandb = pytest.importorskip('wandb')
    folder = tmp_path / 'run'
    _, digest, found = tracked(folder, backend('WandbVisBackend', folder), read=lambda runner: (
        wandb.config['mmrepro/randomness.seed'], wandb.run.summary['mmrepro/weights/last']))
    assert found == ('3', digest[:16])
    kept, = (folder / 'tracked').rglob('files/**/manifest.json')
    assert kept.read_bytes() == (folder / 'mmrepro' / 'manifest.json').read_bytes()


def test_aim_gets_values_by_name_and_the_manifest(tmp_path):
    pytest.importorskip('aim')
    folder = tmp_path / 'run'

    def read(runner):
        run = runner.visualizer.get_backend('AimVisBackend').experiment
        return [run.get(f'mmrepro/{name}') for name in (
            'randomness.seed', 'weights/last', 'manifest.json')]

    _, digest, (seed, last, manifest) = tracked(
        folder, backend('AimVisBackend', folder, init_kwargs=dict(repo=str(folder))), read=read)
    assert (seed, last) == ('3', digest[:16])
    assert manifest == (folder / 'mmrepro' / 'manifest.json').read_text()


class BrokenTracker(LocalVisBackend):
    """It draws, and its server is gone."""

    def __init__(self, save_dir):
        super().__init__(save_dir)

    @property
    def experiment(self):
        import torch
        torch.rand(1)
        raise ConnectionError('no server at tracker.invalid')


def test_a_tracker_that_fails_is_named_and_changes_nothing(tmp_path, monkeypatch):
    from mmengine.registry import VISBACKENDS
    VISBACKENDS.register_module(module=BrokenTracker, force=True)
    monkeypatch.setitem(identity.TRACKERS, 'BrokenTracker', identity.TRACKERS['AimVisBackend'])
    monkeypatch.setattr(logging.Logger, 'warning', lambda self, text, *args: said.append(text))
    said = []
    plain, *_ = tracked(tmp_path / 'plain')
    broken, _, found = tracked(tmp_path / 'run', backend('BrokenTracker', tmp_path / 'run'),
                               read=lambda runner: [text for text in said if 'Tracker' in text])
    assert broken == plain
    assert ('BrokenTracker did not take the params of mmrepro: ConnectionError: no server at '
            'tracker.invalid') in found
    # at the start, two checkpoints and the end
    assert [text.split(' of mmrepro')[0].split()[-1] for text in found] == [
        'file', 'params', 'tags', 'tags', 'file', 'tags']


def test_backends_that_are_no_trackers_are_left_alone(tmp_path):
    _, _, found = tracked(tmp_path / 'run', backend('LocalVisBackend', tmp_path / 'run'))
    assert found is None and not list((tmp_path / 'run' / 'tracked').glob('mmrepro*'))
