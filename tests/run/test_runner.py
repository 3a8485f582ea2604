"""Activation, what runners are accepted, their streams, and what a run says of itself."""
import copy
import time
from contextlib import nullcontext

import pytest
import torch
from harness import python
from mmengine.hooks import Hook
from mmengine.registry import DATASETS, HOOKS, RUNNERS, VISBACKENDS
from mmengine.runner import FlexibleRunner, Runner
from mmengine.visualization import LocalVisBackend
from small_runs import Points, config, hook_with, small_run, trained_runner, validating

import mmrepro
from mmrepro import determinism, seeds
from mmrepro.activation import reproducible_class
from mmrepro.errors import RandomnessError, ResumeError
from mmrepro.run.runner import ReproRunner


def trained(cfg):
    return trained_runner(cfg).model.line.weight.detach().clone()


def test_runs_of_the_same_second_share_nothing(tmp_path, monkeypatch):
    """MMEngine keeps hubs, loggers and visualisers by name and second."""
    monkeypatch.setattr(time, 'time', lambda: 1.7e9)
    first, second = (Runner.from_cfg(config(tmp_path / 'run')) for _ in range(2))
    first.message_hub.update_info('best_score', 1.)
    assert 'best_score' not in second.message_hub.runtime_info
    assert first.logger is not second.logger and first.visualizer is not second.visualizer
    assert first._log_dir != second._log_dir


def test_a_runner_that_is_called_is_reproducible_too(tmp_path):
    """MMEngine's own introduction builds runners like this."""
    class Own(Runner):
        pass

    for cls in (Runner, Own):
        cfg = config(tmp_path, randomness=dict(seed=3))
        called = cls(**{key: cfg[key] for key in cfg})
        assert isinstance(called, mmrepro.ReproRunnerMixin) and isinstance(called, cls)
        called.train()
        assert torch.equal(called.model.line.weight, trained(config(tmp_path)))
    with pytest.raises(RandomnessError, match='FlexibleRunner takes its seeds'):
        FlexibleRunner(model=dict(type='NoisyLine'), work_dir=str(tmp_path))
    with pytest.raises(RandomnessError, match='FlexibleRunner takes its seeds from its strategy'):
        FlexibleRunner.from_cfg(config(tmp_path))
    mmrepro.deactivate()
    assert type(Runner(model=torch.nn.Linear(1, 1), work_dir=str(tmp_path))) is Runner


def test_deactivate_brings_back_the_stock_runner_and_runner_type_needs_no_activation(tmp_path):
    mmrepro.deactivate()
    assert not mmrepro.is_active()
    assert type(Runner.from_cfg(config(tmp_path))) is Runner
    for _ in range(2):
        mmrepro.activate()
    assert type(Runner.from_cfg(config(tmp_path))) is ReproRunner
    mmrepro.deactivate()
    assert type(Runner.from_cfg(config(tmp_path))) is Runner
    for name in ('ReproRunner', 'mmrepro.ReproRunner'):
        assert type(RUNNERS.build(config(tmp_path, runner_type=name))) is ReproRunner


def test_deactivate_undoes_a_seed_without_a_runner():
    code = ('import mmrepro, torch; mmrepro.set_random_seed(3, deterministic=True); '
            'on = torch.are_deterministic_algorithms_enabled; print(on()); '
            'mmrepro.deactivate(); print(on())')
    assert python('-c', code) == 'True\nFalse\n'


def test_importing_imports_neither_torch_nor_openmmlab_and_finds_operators_once():
    code = ('import sys, mmrepro; from mmrepro import ops; ops.install(); print('
            '[name for name in ("torch", "mmengine", "mmcv") if name in sys.modules],'
            'sum("mmrepro.ops" in type(finder).__module__ for finder in sys.meta_path))')
    assert python('-c', code) == '[] 1\n'


class OtherName(Runner):
    def __init__(self, **settings):
        super().__init__(**settings)


class Named(Runner):
    def __init__(self, model, work_dir, **kwargs):
        super().__init__(model, work_dir, **kwargs)


class Direct(Runner):
    def __init__(self, *args, **kwargs):
        Runner.__init__(self, *args, **kwargs)


@pytest.mark.parametrize('cls', [OtherName, Named, Direct])
def test_a_runner_of_ones_own_may_take_its_arguments_in_any_way(cls, tmp_path):
    expected = trained(config(tmp_path / 'stock'))
    cfg = config(tmp_path / 'own')
    runners = [cls.from_cfg(cfg)]
    settings = {key: cfg[key] for key in cfg}
    if cls is not OtherName:
        runners.append(cls(settings.pop('model'), settings.pop('work_dir'), **settings))
    for runner in runners:
        assert runner.repro.seed == 3
        runner.train()
        assert torch.equal(runner.model.line.weight, expected)


def test_a_runner_of_ones_own_may_leave_out_what_the_runner_does(tmp_path):
    class Empty(Runner):
        def __init__(self, model, work_dir):
            self.model = model

    assert Empty('model', str(tmp_path)).model == 'model'


def test_a_runner_that_seeds_by_itself_is_refused():
    class Own(Runner):
        def set_randomness(self, seed, **kwargs):
            pass

    with pytest.raises(RandomnessError, match='Own has its own set_randomness'):
        reproducible_class(Own)

    class Combined(mmrepro.ReproRunnerMixin, Own):
        pass

    assert reproducible_class(Combined) is Combined


def test_the_default_dict_of_the_runner_stays_as_it_is(tmp_path):
    import inspect
    default = inspect.signature(Runner.__init__).parameters['randomness'].default
    before = copy.deepcopy(default)
    cfg = config(tmp_path)
    runner = ReproRunner(model=cfg.model, work_dir=str(tmp_path), cfg=cfg)
    assert default == before and runner.seed is not None
    assert runner._randomness_cfg is not default


def test_effective_values_are_in_config_dump_log_and_checkpoint(tmp_path, capfd):
    runner = Runner.from_cfg(config(tmp_path, randomness=dict(seed=None), log_level='INFO'))
    seed = runner.seed
    runner.train()
    assert runner.cfg.randomness['seed'] == seed
    dumped = next(tmp_path.glob('*.py')).read_text()
    assert f'seed={seed}' in dumped and "worker_seed='sample'" in dumped
    log = next(tmp_path.glob('*/*.log')).read_text()
    assert 'promised' in log and 'seed  ' in log and str(seed) in log
    said = ''.join(capfd.readouterr())
    start = said[said.index(' - mmrepro '):].partition('says which, and why')[0]
    assert f'seed={seed}' in start and start.count('\n') < 10 and 'promised' not in said
    meta = torch.load(tmp_path / 'epoch_2.pth', weights_only=False)['meta']
    assert meta['mmrepro']['randomness']['seed'] == meta['seed'] == seed
    assert meta['mmrepro']['scheme'] == 1


def test_the_log_has_a_line_for_each_flag_and_why_it_was_changed(tmp_path):
    ReproRunner.from_cfg(config(tmp_path, log_level='INFO'))
    lines = next(tmp_path.glob('*/*.log')).read_text().splitlines()
    assert not [line for line in lines if 'PolicySettings' in line]
    changed = [line for line in lines if line.startswith('NCCL_PROTO: not set -> Simple (')]
    assert len(changed) == 1 and changed[0].endswith(')') and len(changed[0]) < 200


@pytest.mark.parametrize('deterministic', [True, False])
def test_determinism_wins_over_a_config_that_lets_cudnn_choose(deterministic, tmp_path):
    """As in MMEngine: YOLACT, PSPNet and many others ask for both."""
    cfg = config(tmp_path, env_cfg=dict(cudnn_benchmark=True), log_level='INFO',
                 randomness=dict(seed=1, deterministic=deterministic))
    try:
        Runner.from_cfg(cfg)
        assert torch.backends.cudnn.benchmark is not deterministic
    finally:
        torch.backends.cudnn.benchmark = False
    log = next(tmp_path.glob('*/*.log')).read_text()
    assert log.count('cudnn_benchmark=True is not') == deterministic


def test_keys_of_mmdetection_2_work(tmp_path):
    keys = dict(seed=5, deterministic=True, diff_rank_seed=True)
    cfg = config(tmp_path, seed=5, deterministic=True, diff_seed=True, randomness={})
    with pytest.warns(DeprecationWarning, match=r'randomness = dict\(seed=5, deterministic=True, '
                      r'diff_rank_seed=True\)'):
        runner = Runner.from_cfg(cfg)
    assert {key: runner.cfg.randomness[key] for key in keys} == keys
    assert not {'seed', 'deterministic', 'diff_seed'} & set(runner.cfg)


def test_the_mode_mmengine_repeats_stock_mmengine(tmp_path):
    """Old runs can be repeated, and what differs is the streams alone."""
    legacy = dict(seed=3, worker_seed='mmengine')
    ours = trained(config(tmp_path, randomness=legacy))
    mmrepro.deactivate()
    stock = trained(config(tmp_path))
    assert torch.equal(ours, stock)


@pytest.mark.parametrize('key', ['randomnes', 'Randomness', 'randomess', 'randomnesss'])
def test_a_misspelt_randomness_is_refused(tmp_path, key):
    with pytest.raises(RandomnessError, match=rf"'{key}' .*seed.*did you mean 'randomness'"):
        Runner.from_cfg(config(tmp_path, **{key: dict(seed=7)}))
    Runner.from_cfg(config(tmp_path, randomness_b=dict(seed=7)))  # a variable of the config's own


@VISBACKENDS.register_module(force=True)
class DrawingBackend(LocalVisBackend):
    def add_config(self, config, **kwargs):
        torch.rand(5)


def test_what_visualisers_draw_does_not_move_the_initial_weights(tmp_path):
    drawn = config(tmp_path / 'a', visualizer=dict(type='Visualizer', vis_backends=[
        dict(type='DrawingBackend', save_dir=str(tmp_path / 'vis'))]))
    assert torch.equal(trained(drawn), trained(config(tmp_path / 'b')))


def test_a_runner_trains_under_its_own_settings_whoever_was_built_since(tmp_path):
    cfg = config(tmp_path / 'a', randomness=dict(seed=3, deterministic=True))
    first = Runner.from_cfg(cfg)
    Runner.from_cfg(config(tmp_path / 'b', randomness=dict(seed=9)))
    assert not torch.are_deterministic_algorithms_enabled()
    first.train()
    assert torch.are_deterministic_algorithms_enabled() and seeds.root() == seeds.RootSeed(3)
    assert determinism.in_force() is first.lifecycle.process.report


@HOOKS.register_module(force=True)
class BuildsARunner(Hook):
    """Evaluates with a runner of its own, as distillation and self-training do."""

    def __init__(self, work_dir):
        self.work_dir, self.flags = work_dir, []

    def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None):
        Runner.from_cfg(config(self.work_dir, randomness=dict(seed=9)))

    def before_train_iter(self, runner, batch_idx, data_batch=None):
        self.flags.append((torch.are_deterministic_algorithms_enabled(), seeds.root()))


def test_a_runner_that_a_hook_builds_leaves_the_run_alone(tmp_path):
    settings = dict(randomness=dict(seed=3, deterministic=True))
    runner = Runner.from_cfg(config(tmp_path / 'a', **settings))
    hook = BuildsARunner(tmp_path / 'inner')
    runner.register_hook(hook, priority='VERY_LOW')
    runner.train()
    assert hook.flags == [(True, seeds.RootSeed(3))] * 8
    assert torch.equal(runner.model.line.weight, trained(config(tmp_path / 'b', **settings)))


@pytest.mark.parametrize('mode, warnings', [(True, 0), ('warn', 1), (False, 0)])
def test_a_flag_that_somebody_changed_stops_the_run_or_is_a_warning(mode, warnings, tmp_path):
    runner = Runner.from_cfg(config(tmp_path, randomness=dict(seed=3, deterministic=mode)))
    runner.register_hook(hook_with(after_train_iter=lambda runner, **kwargs:
                                   torch.use_deterministic_algorithms(False)), 'VERY_HIGH')
    said = []
    runner.logger.warning = said.append
    with pytest.raises(determinism.DeterminismError, match='deterministic.*must put it back'
                       ) if mode is True else nullcontext():
        runner.train()
    assert sum('must put it back' in text for text in said) == warnings


@DATASETS.register_module(force=True)
class SeesFlags(Points):
    seen = []

    def __init__(self):
        self.seen.append((torch.are_deterministic_algorithms_enabled(), seeds.root()))


@pytest.mark.parametrize('what', ['train', 'val', 'test'])
def test_data_sets_are_built_under_the_settings_of_their_own_runner(tmp_path, what):
    cfg = validating(config(tmp_path / 'a', randomness=dict(seed=3, deterministic=True)),
                     phases=[what] if what != 'train' else [])
    cfg[f'{what}_dataloader'].dataset.type = 'SeesFlags'
    runner = Runner.from_cfg(cfg)
    Runner.from_cfg(config(tmp_path / 'b', randomness=dict(seed=9)))
    SeesFlags.seen.clear()
    getattr(runner, what)()
    assert SeesFlags.seen == [(True, seeds.RootSeed(3))]


class Draws(Hook):
    """What each stream gave: bytes by the name of the stream."""
    priority = 100  # after the seeds of the step

    def __init__(self):
        self.found = {}

    def add(self, stream, tensor):
        self.found[stream] = self.found.get(stream, b'') + tensor.detach().numpy().tobytes()

    def before_train(self, runner):
        self.add('init', runner.model.line.weight)

    def before_train_iter(self, runner, batch_idx, data_batch=None):
        points = torch.stack(data_batch['x'])
        # the first number of a point is its index and noise below 1
        self.add('sampler', points[:, 0].floor())
        self.add('sample', points[:, 1])

    def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None):
        self.add('step', torch.rand(4))  # where the step has left its stream

    def before_val_iter(self, runner, batch_idx, data_batch=None):
        self.add('val', torch.stack(data_batch['x'])[:, 1])


def draws(work_dir, seed, **streams):
    cfg = config(work_dir, randomness=dict(seed=seed, streams=streams))
    runner = Runner.from_cfg(validating(cfg))
    hook = Draws()
    runner.register_hook(hook, priority=hook.priority)
    runner.train()
    return hook.found


@pytest.fixture(scope='module')
def whole(tmp_path_factory):
    return {seed: draws(tmp_path_factory.mktemp(f'seed{seed}'), seed) for seed in (3, 9)}


@pytest.mark.parametrize('stream', ['init', 'sampler', 'sample', 'step', 'val'])
def test_only_this_stream_changes_and_it_is_that_of_the_other_seed(whole, tmp_path, stream):
    found = draws(tmp_path, 3, **{stream: 9})
    # noise is that of the position, whichever point lies there
    expected = {name: whole[9 if name == stream else 3][name] for name in whole[3]}
    assert {name: found[name] == expected[name] for name in expected} == dict.fromkeys(found, True)
    assert whole[3][stream] != whole[9][stream]


def test_the_root_of_the_seed_itself_changes_nothing(whole, tmp_path):
    assert draws(tmp_path, 3, init=3, step=3) == whole[3]


def test_hooks_and_what_datasets_choose_have_streams_too(tmp_path):
    runner = Runner.from_cfg(config(tmp_path, randomness=dict(seed=3, streams=dict(dataset=5))))
    assert seeds.derive(seeds.root(), 'dataset', 'x') == seeds.derive(5, 'dataset', 'x')
    assert runner.cfg.randomness.streams == dict(dataset=5)
    assert runner.lifecycle.facts['randomness.streams.dataset'] == 5


def test_a_resume_compares_them(tmp_path):
    small = small_run(tmp_path, randomness=dict(seed=3, streams=dict(sample=5)))
    Runner.from_cfg(small).train()
    again = small_run(tmp_path, randomness=dict(seed=3, streams=dict(sample=5)), resume=True)
    Runner.from_cfg(again)
    for streams in ({}, dict(sample=6), dict(sample=5, step=5)):
        changed = small_run(tmp_path, randomness=dict(seed=3, streams=streams), resume=True)
        with pytest.raises(ResumeError, match=r'randomness\.streams\.\w+ .*in this stream'):
            Runner.from_cfg(changed)


def test_a_program_that_builds_its_own_config_is_given_a_randomness(tmp_path):
    """Every key of it replaces that of the config, and a seed that is replaced is said."""
    wanted = trained(config(tmp_path / 'wanted', randomness=dict(seed=5, deterministic=True)))
    mmrepro.activate(randomness=dict(seed=5, deterministic=True))
    none = config(tmp_path / 'none')
    none.pop('randomness')
    assert torch.equal(trained(none), wanted)
    with pytest.warns(UserWarning, match=r'randomness.seed=3 of the config is replaced by 5'):
        runner = trained_runner(config(tmp_path / 'own', randomness=dict(seed=3)))
    assert torch.equal(runner.model.line.weight, wanted)
    assert runner.cfg.randomness.seed == 5 and runner.repro.deterministic is True
    mmrepro.activate()  # as every import does
    assert Runner.from_cfg(config(tmp_path / 'again', randomness={})).repro.seed == 5
    mmrepro.activate(randomness={})
    assert Runner.from_cfg(config(tmp_path / 'config')).repro.seed == 3


def test_a_wrong_randomness_is_refused_where_it_is_given():
    with pytest.raises(RandomnessError, match="unknown key 'sed'"):
        mmrepro.activate(randomness=dict(sed=5))


def test_a_seed_that_a_runner_overrides_is_said(tmp_path, capfd):
    for called, said in ((3, False), (4, True)):
        mmrepro.set_random_seed(called)
        cfg = config(tmp_path / str(called))
        Runner.from_cfg(cfg)
        Runner.from_cfg(cfg)  # once: a run of this process came since
        words = f'mmrepro.set_random_seed({called}) was called before, and this run has the seed 3'
        printed = capfd.readouterr()
        assert (printed.out + printed.err).count(words) == said
