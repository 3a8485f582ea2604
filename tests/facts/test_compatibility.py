"""What differs between then and now stops a resume, when it changes bits."""
import copy
import io
import os
import re

import pytest
import torch
from mmengine.config import Config
from mmengine.runner import Runner
from small_runs import Points, finish, hook_with, small_run

import mmrepro
from mmrepro.demo.dataset import demo_config
from mmrepro.errors import ResumeError
from mmrepro.facts import collect, compatibility
from mmrepro.facts.collect import cpu_features, flatten, read_settings, settings_of
from mmrepro.facts.compatibility import CHANGES, HARMLESS, differences

pytestmark = pytest.mark.usefixtures('no_pause_between_passes')


@pytest.fixture(scope='module')
def base(tmp_path_factory):
    """Return the work directory of a training that has imported what its resumes import."""
    folder = tmp_path_factory.mktemp('base')
    finish(small_run(folder))
    return folder


def resumed(base, tmp_path, **changes):
    return small_run(tmp_path, resume=True, load_from=str(base / 'iter_3.pth'), **changes)


REFUSED = {
    'optim_wrapper.optimizer.lr': 0.2,
    'train_dataloader.batch_size': 4,
    'custom_hooks': [dict(type='EMAHook')],
    'randomness.worker_seed': 'worker',
    'model.type': 'mmengine.NoisyLine',
}


@pytest.mark.parametrize('name', REFUSED)
def test_what_changes_bits_stops_with_a_table(name, base, tmp_path):
    cfg = resumed(base, tmp_path, **{name: REFUSED[name]})
    with pytest.raises(ResumeError) as caught:
        Runner.from_cfg(cfg)
    now = repr('EMAHook' if name == 'custom_hooks' else REFUSED[name])
    row = next(line for line in str(caught.value).splitlines() if name in line)
    assert now in row and str(base / 'iter_3.pth') in str(caught.value)
    assert 'may not be' in str(caught.value) and 'resume_strict=False' in str(caught.value)
    assert ('whatever the config says' in str(caught.value)) == ('lr' in name)
    if 'lr' in name:  # it goes on when the user says so
        cfg.randomness.resume_strict = False
        runner = Runner.from_cfg(cfg)
        assert any(name in line for line in runner.lifecycle.differences)
        runner.train()
        assert runner.iter == 8
        as_built = small_run(tmp_path).optim_wrapper.optimizer.lr
        assert runner.optim_wrapper.get_lr()['lr'] == [as_built]


HARMLESS_CHANGES = {
    'train_dataloader.num_workers': 2,
    'log_level': 'ERROR',
    'default_hooks.checkpoint.interval': 5,
    'env_cfg': dict(mp_cfg=dict(opencv_num_threads=2)),
    'a_variable_of_a_base_config': 3,
}


def test_harmless_changes_are_said_in_one_line_and_nothing_of_the_same_run(base, tmp_path):
    runner = Runner.from_cfg(resumed(base, tmp_path, **HARMLESS_CHANGES))
    assert len(runner.lifecycle.differences) == 1, '\n'.join(runner.lifecycle.differences)
    line, = runner.lifecycle.differences
    assert '\n' not in line
    for name in ('num_workers 0 -> 2', 'log_level', 'checkpoint.interval'):
        assert name in line
    assert Runner.from_cfg(resumed(base, tmp_path)).lifecycle.differences == []


WORKERS, INTERVAL = 'config.train_dataloader.num_workers', 'config.train_cfg.val_interval'
STOPS = 'config.custom_hooks[0].type'
PRECISION = {'hardware.gpu': 'H100', 'torch.backends.cudnn.allow_tf32': True,
             'randomness.numerics.float32_precision': None}
AVX512 = {'hardware.cpu_features': 'sse4_2 avx fma avx2 avx512f'}
# facts then, what is another one now, what follows, and a part of the reason
FOLLOWS = [
    # streams of workers depend on their number; mmrepro makes harmless what a stock run depends on
    *(({'randomness.worker_seed': mode}, {WORKERS: 2}, severity, '') for mode, severity in (
        ('sample', HARMLESS), ('worker', CHANGES), ('mmengine', CHANGES))),
    *(({compatibility.ATTACHED: attached}, {name: 2}, severity, '')
      for name in (WORKERS, INTERVAL, 'env.PYTHONHASHSEED',
                   'config.train_dataloader.persistent_workers')
      for attached, severity in ((True, HARMLESS), (False, CHANGES))),
    *(({}, {name: 'another'}, CHANGES, '') for name in ('hardware.cpu', 'version.torch')),
    ({}, {WORKERS: 2}, HARMLESS, 'each sample has a stream of its own'),
    # as for training, where it reacts to metrics
    *(({STOPS: 'EarlyStoppingHook', 'randomness.worker_seed': mode}, {name: 2}, severity, '')
      for name in ('config.val_dataloader.num_workers', 'config.val_dataloader.persistent_workers')
      for mode, severity in (('sample', HARMLESS), ('worker', CHANGES))),
    ({STOPS: 'EarlyStoppingHook'}, {'config.val_dataloader.pin_memory': 2}, HARMLESS, 'speed'),
    ({STOPS: 'EarlyStoppingHook'}, {'config.val_dataloader.batch_size': 2}, CHANGES, 'metrics'),
    ({}, {'config.env_cfg.dist_cfg': 2}, HARMLESS, 'there is one rank'),
    # another precision matters by its flags, not by its key
    (PRECISION, {'randomness.numerics.float32_precision': 'high'}, HARMLESS, ''),
    (PRECISION, {'torch.backends.cudnn.allow_tf32': False}, CHANGES, ''),
    ({}, {'randomness.numerics.num_threads': 4}, HARMLESS, 'compared by itself'),
    # validation matters where training reacts to it
    *(({'config.custom_hooks[0].type': hook}, {INTERVAL: 2}, severity, '') for hook, severity in (
        ('EarlyStoppingHook', CHANGES), ('CheckInvalidLossHook', HARMLESS))),
    # another CPU loads other batches where it has no AVX2
    (AVX512, {'hardware.cpu_features': 'sse4_2 avx fma avx2'}, HARMLESS, 'same on CPUs with AVX2'),
    (AVX512, {'hardware.cpu_features': 'sse4_2 avx'}, CHANGES, 'x86-64 CPUs with AVX2 only'),
    (AVX512, {'hardware.cpu_features': None}, CHANGES, 'x86-64 CPUs with AVX2 only'),
    *((dict(AVX512, **{name: None}), {name: 'AVX2'}, CHANGES, 'different pixels')
      for name in ('env.OPENCV_IPP', 'env.OPENCV_CPU_DISABLE')),
    # what NCCL adds up in another order
    *(({'hardware.gpu': 'a', 'world_size': ranks, **virtual}, {name: 'another'}, severity, '')
      for name in ('version.nccl', 'env.NCCL_TUNER_CONFIG_FILE', 'ranks_per_machine')
      for ranks, virtual, severity in ((3, {}, CHANGES), (2, {}, HARMLESS),
                                       (3, {'randomness.virtual_ranks.ranks': 3}, HARMLESS))),
    # a level needs other variables on another CPU
    ({'randomness.numerics.cpu': 'avx2'}, {'env.NPY_DISABLE_CPU_FEATURES': 'X86_V4'}, HARMLESS,
     'randomness.numerics.cpu pins'),
]


@pytest.mark.parametrize('then, now, severity, reason', FOLLOWS)
def test_what_follows_from_another_fact(then, now, severity, reason):
    row, = differences({**dict.fromkeys(now, 1), **then}, {**then, **now})
    assert row.severity == severity and reason in row.consequence


def test_what_stock_runs_need_not_set_is_no_difference():
    assert differences({}, {'randomness.diff_rank_seed': False}) == []
    assert differences({'randomness.diff_rank_seed': True}, {})[0].severity == CHANGES


AVERAGING = {
    # hook: severity by (ranks, by_epoch)
    'mmdet.SyncNormHook': {(1, True): HARMLESS, (2, True): CHANGES, (2, False): CHANGES},
    'SyncBuffersHook': {(1, False): HARMLESS, (2, True): HARMLESS, (2, False): CHANGES},
    'NumClassCheckHook': {(2, False): HARMLESS},
}


@pytest.mark.parametrize('hook', AVERAGING)
def test_validation_matters_where_ranks_average_statistics_at_it(hook):
    for (ranks, by_epoch), severity in AVERAGING[hook].items():
        facts = settings_of(dict(
            custom_hooks=[dict(type=hook)], val_cfg=dict(type='ValLoop'),
            val_dataloader=dict(batch_size=1),
            train_cfg=dict(by_epoch=by_epoch, max_epochs=3, val_interval=1)))
        facts['world_size'] = ranks
        for name in ('config.train_cfg.val_interval', 'config.val_cfg.type',
                     'config.train_cfg.dynamic_intervals[0]'):
            row, = differences(facts, {**facts, name: 2})
            assert row.severity == severity, (name, ranks, by_epoch)
        row, = differences(facts, {**facts, 'config.val_dataloader.batch_size': 2})
        assert row.severity == HARMLESS


WATCHING = ['PreemptHook', 'OperatorGuardHook', 'IterTimerHook', 'EmptyCacheHook',
            'FingerprintHook']


def test_hooks_that_change_nothing_may_be_added(base, tmp_path):
    expected = finish(small_run(tmp_path / 'whole'))
    cfg = resumed(base, tmp_path, custom_hooks=[dict(type=name) for name in WATCHING])
    cfg.default_hooks.empty_cache = dict(type='EmptyCacheHook', after_epoch=True)
    assert finish(cfg) == expected


def test_hooks_that_change_nothing_may_be_left_out_wherever_they_stood():
    def facts(*kinds, **ema):
        return settings_of(dict(custom_hooks=[
            dict(ema, type=kind) if kind == 'EMAHook' else dict(type=kind) for kind in kinds]))

    then = facts('PreemptHook', 'EMAHook', 'mmdet.NumClassCheckHook', 'Own', momentum=0.1)
    assert differences(then, facts('EMAHook', 'Own', momentum=0.1)) == []
    row, = differences(then, facts('IterTimerHook', 'EMAHook', 'Own', momentum=0.2))
    assert (row.name, row.severity) == ('config.custom_hooks[0].momentum', CHANGES)


STEP = dict(type='StepLR', step_size=1, gamma=0.5)
MMDETECTION = dict(
    train_cfg=dict(type='EpochBasedTrainLoop', max_epochs=12, val_interval=1),
    param_scheduler=[dict(type='LinearLR', by_epoch=False, begin=0, end=500),
                     dict(type='MultiStepLR', begin=0, end=12, milestones=[8, 11])],
    custom_hooks=[dict(type='NumClassCheckHook'), dict(type='EMAHook')],
    default_hooks=dict(timer=dict(type='IterTimerHook'), checkpoint=dict(
        type='CheckpointHook', interval=1), sampler_seed=dict(type='DistSamplerSeedHook'),
        visualization=dict(type='DetVisualizationHook')))


@pytest.mark.parametrize('schedule', [None, [dict(STEP, end=2)]], ids=['none', 'with an end'])
def test_a_training_may_be_longer_when_nothing_counts_from_its_end(schedule, tmp_path):
    def run(folder, epochs, **changes):
        return finish(small_run(folder, param_scheduler=schedule, **changes,
                                train_cfg=dict(by_epoch=True, max_epochs=epochs)))

    expected = run(tmp_path / 'long', 3)
    run(tmp_path, 2)
    for point in ('iter_3', 'iter_8'):
        found = run(tmp_path / point, 3, resume=True, load_from=str(tmp_path / f'{point}.pth'))
        assert found == expected


@pytest.mark.parametrize('settings, named', [
    (dict(param_scheduler=STEP), 'StepLR'),
    (dict(param_scheduler=[dict(STEP, end=2), STEP]), 'StepLR'),
    (dict(param_scheduler=dict(generator=[STEP])), 'StepLR'),
    (dict(param_scheduler=print), 'param_scheduler'),
    (dict(custom_hooks=[dict(type='mmdet.YOLOXModeSwitchHook')]), 'YOLOXModeSwitchHook'),
    (dict(custom_hooks=[print]), 'custom_hooks'),
    (dict(default_hooks=dict(own=dict(type='Own'))), 'Own'),
    (dict(custom_hooks=[dict(type='mine.Printing', every=3), dict(type='EMAHook')]), 'Printing'),
    (dict(custom_hooks=[dict(type='EarlyStoppingHook')]), 'EarlyStoppingHook'),
    (dict(optim_wrapper=dict(accumulative_counts=2)), 'optim_wrapper.accumulative_counts'),
    (dict(train_cfg=dict(type='OwnLoop')), 'OwnLoop'), (MMDETECTION, '')], ids=str)
def test_a_longer_training_is_refused_where_something_counts_from_its_end(settings, named):
    """Nothing does in an ordinary config of MMDetection."""
    facts = settings_of(settings)
    length = 'config.train_cfg.max_epochs'
    row, = differences({**facts, length: 12}, {**facts, length: 24})
    assert row.severity == (CHANGES if named else HARMLESS)
    said = f'what may count from the end of the training moves: {named}'
    assert row.consequence.startswith(said) or not named


def test_other_data_are_found_once_they_are_loaded(base, tmp_path, monkeypatch):
    monkeypatch.setattr(Points, '__len__', lambda self: 16)
    with pytest.raises(ResumeError, match='train_samples +8 +16'):
        Runner.from_cfg(resumed(base, tmp_path)).train()


def test_a_checkpoint_has_the_instruction_sets(base):
    facts = torch.load(base / 'iter_3.pth', weights_only=False)['meta']['mmrepro']['facts']
    assert 'hardware.cpu_features' in facts and 'hardware.cpu_instructions' in facts
    for name in ('ATEN_CPU_CAPABILITY', 'MKL_CBWR', 'ONEDNN_MAX_CPU_ISA', 'OPENCV_CPU_DISABLE',
                 'OPENCV_IPP', 'NPY_DISABLE_CPU_FEATURES', 'OPENBLAS_CORETYPE'):
        assert facts[f'env.{name}'] == os.environ.get(name)


@pytest.mark.parametrize('text, features', [
    ('model name\t: ACME\nflags\t\t: fpu avx2 sse4_2 fma avx\n', 'sse4_2 avx fma avx2'),
    ('Features\t: fp asimd sve\n', 'asimd sve'), ('processor\t: 0\n', None)])
def test_features_are_those_that_libraries_have_kernels_for(text, features, monkeypatch):
    monkeypatch.setattr('builtins.open', lambda path: io.StringIO(text))
    assert cpu_features() == features
    assert collect.cpu_name() == 'ACME' or 'ACME' not in text


def test_every_row_is_reached_and_the_last_takes_all():
    assert compatibility.RULES[-1].pattern == '*'
    assert {rule.only for rule in compatibility.RULES} - {''} == set(compatibility.CONDITIONS)


def test_a_checkpoint_of_stock_mmengine_resumes(tmp_path):
    mmrepro.deactivate()
    stock = small_run(tmp_path / 'stock')
    Runner.from_cfg(stock).train()
    mmrepro.activate()
    cfg = resumed(tmp_path / 'stock', tmp_path, **{'optim_wrapper.optimizer.lr': 0.2})
    runner = Runner.from_cfg(cfg)
    assert 'written without mmrepro' in runner.lifecycle.resume.point.report
    assert any('optimizer.lr' in line for line in runner.lifecycle.differences)
    weights = torch.load(tmp_path / 'stock' / 'iter_3.pth', weights_only=False)
    seen = {}

    def look(runner, batch_idx, data_batch):
        if not seen:
            seen.update(iter=runner.iter, batch_idx=batch_idx, weights=copy.deepcopy(
                runner.model.state_dict()))

    runner.register_hook(hook_with(before_train_iter=look), priority=0)
    runner.train()
    assert (seen['iter'], seen['batch_idx']) == (3, 3) and runner.iter == 8
    for name, value in weights['state_dict'].items():
        assert torch.equal(seen['weights'][name], value)


def test_reading_a_config_runs_nothing(tmp_path):
    marker = tmp_path / 'ran'
    text = f"model = dict(type='A')\nbad = open({str(marker)!r}, 'w')\nimport os\nx = (1, -2)\n"
    assert read_settings(text) == {'model': {'type': 'A'}, 'bad': f'open({str(marker)!r}, \'w\')',
                                   'x': [1, -2]}
    assert not marker.exists()


@pytest.mark.parametrize('name', ['yolox_s', 'deformable-detr_r50', 'rtmdet_tiny'])
def test_text_and_config_give_the_same_settings(name):
    cfg = demo_config(name)
    assert flatten(read_settings(cfg.pretty_text)) == flatten(cfg.to_dict())


def test_classes_and_functions_of_lazy_configs_have_no_addresses():
    facts = collect.collect_facts(Config(dict(model=dict(type=torch.nn.Linear), f=print)), {}, 1)
    assert facts['processes'] == 1
    assert facts['config.f'] == 'builtins.print'
    assert '0x' not in str(list(facts.values()))


STREAMS = {
    # name: (randomness, train_cfg, checkpoint -> whether it is refused)
    'of workers': (dict(worker_seed='worker'), dict(by_epoch=True, max_epochs=3),
                   {'iter_4': False, 'iter_5': True, 'iter_8': False}),
    'of workers, passes': (dict(worker_seed='worker'),
                           dict(by_epoch=False, max_iters=12, val_interval=100),
                           {'iter_4': False, 'iter_5': True}),
    'of MMEngine': (dict(worker_seed='mmengine'),
                    dict(by_epoch=True, max_epochs=3), {'epoch_1': True, 'iter_5': True}),
}


@pytest.mark.parametrize('name', STREAMS)
def test_a_place_that_streams_cannot_be_brought_to_is_refused(name, tmp_path):
    """Batches in one stream per worker and epoch: the rest of an epoch cannot be drawn alone."""
    randomness, loop, points = STREAMS[name]

    def run(folder, **changes):
        cfg = small_run(folder, train_cfg=loop, **changes)
        cfg.randomness = dict(seed=3, resume_strict=cfg.randomness.get('resume_strict', True),
                              **randomness)
        cfg.train_dataloader.num_workers = 2 if 'workers' in name else 0
        if 'epoch_1' in points:
            cfg.custom_hooks = [dict(type='CheckpointHook', interval=1, priority='LOWEST')]
        return cfg

    expected = finish(run(tmp_path))
    for point, refused in points.items():
        from_point = dict(resume=True, load_from=str(tmp_path / f'{point}.pth'))
        if not refused:
            assert finish(run(tmp_path / point, **from_point)) == expected, point
            continue
        with pytest.raises(ResumeError, match=f'worker_seed={randomness["worker_seed"]!r}.*'
                                              'resume_strict=False'):
            finish(run(tmp_path / point, **from_point))
        assert finish(run(tmp_path / point, **from_point, **{
            'randomness.resume_strict': False})) != expected, point


@pytest.mark.parametrize('old, new, same', [
    ('CPU capability usage: .*', 'CPU capability usage: AVX2', True),
    ('CPU capability usage: .*', 'CPU capability usage: AVX512', True),
    ('GCC [0-9.]+', 'GCC 9.3', False)])
def test_the_instruction_set_is_no_part_of_the_build_of_torch(old, new, same, monkeypatch):
    """Torch's text names it among compilers and libraries; it is a fact by itself."""
    text = torch.__config__.show()
    before = collect._torch_build()
    assert re.search(old, text)
    monkeypatch.setattr(torch.__config__, 'show', lambda: re.sub(old, new, text))
    assert (collect._torch_build() == before) is same
