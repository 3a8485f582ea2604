"""On several ranks: one model is validated and saved, and a resumed job has every rank's state."""
import copy
import functools

import pytest
import torch
from harness import digest
from mmengine.dist import get_rank
from mmengine.evaluator import BaseMetric
from mmengine.hooks import Hook
from mmengine.logging import MessageHub
from mmengine.registry import HOOKS, METRICS, MODELS
from mmengine.runner import Runner
from preempted_runs import Small
from preempted_runs import settings as small_settings
from ranks import as_rank, joined, on_ranks
from small_runs import (
    NoisyLine,  # noqa: F401  registered
    Points,
)

import mmrepro
from mmrepro.checkpoint import files
from mmrepro.checkpoint.rank_state import mean_of_ranks


@MODELS.register_module(force=True)
class OwnStatistics(Small):
    """BatchNorm without synchronisation, and a number that every rank counts for itself."""

    def __init__(self):
        super().__init__()
        self.register_buffer('seen', torch.zeros(1))

    def forward(self, x, mode='tensor'):
        x = torch.stack(x).float()
        if mode == 'loss':
            self.seen.add_(x.abs().sum())
            return dict(loss=(self.layers(x) - x[:, :1]).square().mean())
        return list(self.layers(x) + self.seen)


@METRICS.register_module(force=True)
class Predictions(BaseMetric):
    """The predictions themselves, as text: nothing is rounded."""

    def process(self, data_batch, data_samples):
        self.results += [float(value).hex() for value in data_samples]

    def compute_metrics(self, results):
        return dict(predictions=digest(results), first=results[0], last=results[-1])


@HOOKS.register_module(force=True)
class SavesWhileValidating(Hook):

    def after_val_iter(self, runner, batch_idx, data_batch=None, outputs=None):
        if batch_idx == 1:
            runner.save_checkpoint(runner.work_dir, f'validating_{runner.iter}.pth', by_epoch=False,
                                   meta=dict(epoch=runner.epoch, iter=runner.iter))


EMA = dict(type='EMAHook', momentum=0.3)
AVERAGES = {'none': [], 'weights': [EMA], 'weights and buffers': [dict(EMA, update_buffers=True)]}


def settings(work_dir, average='none', **changes):
    cfg = small_settings(work_dir, **{
        'model.type': 'OwnStatistics', 'val_evaluator.type': 'Predictions',
        'train_dataloader.batch_size': 3, 'train_dataloader.dataset': dict(size=18, noise=0.),
        'val_dataloader.batch_size': 1, 'val_dataloader.dataset': dict(size=13, noise=0.),
        'optim_wrapper.optimizer.lr': 0.05, 'optim_wrapper.accumulative_counts': 1,
        'default_hooks.checkpoint': dict(interval=1, by_epoch=False, max_keep_ckpts=-1),
        'randomness.deterministic': True})
    cfg.custom_hooks, cfg.param_scheduler, cfg.default_hooks.logger = (
        list(AVERAGES[average]), None, None)
    cfg.test_dataloader, cfg.test_cfg, cfg.test_evaluator = (
        cfg.val_dataloader, dict(), cfg.val_evaluator)
    cfg.merge_from_dict(changes)
    return cfg


def state_of(runner):
    averages = [hook.ema_model.state_dict() for hook in runner.hooks if hasattr(hook, 'ema_model')]
    model = runner.model.module
    return dict(model=digest(model.state_dict()), ema=digest(averages),
                own=digest([dict(model.named_buffers()), getattr(model, 'largest', None)]))


trained = functools.partial(as_rank, look=state_of)


def evaluated(rank, world, port, cfg, work_dir):
    found = []
    with joined(rank, world, port, cfg):
        for iteration in (3, 6, 9):
            cfg.load_from = f'{work_dir}/iter_{iteration}.pth'
            metrics = Runner.from_cfg(cfg).test()
            found.append({name: repr(value) for name, value in metrics.items()})
    return found


@pytest.fixture(scope='module', params=[
    'none', pytest.param('weights', marks=pytest.mark.nightly), 'weights and buffers'])
def run(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp('run')
    cfg = settings(folder, request.param)
    return request.param, folder, on_ranks(2, cfg, folder, function=trained)


@pytest.mark.parametrize('world', [1, 2])
def test_the_checkpoint_is_the_model_that_was_validated(world, run, tmp_path):
    average, folder, (first, second) = run
    assert first['model'] != second['model'], 'ranks train with statistics of their own'
    assert first['metrics'] == second['metrics'] and len(first['metrics']) == 3
    for found in on_ranks(world, settings(tmp_path, average), folder, function=evaluated):
        assert found == first['metrics']


def test_training_goes_on_as_if_nothing_was_validated_or_saved(run, tmp_path):
    average, _, expected = run
    cfg = settings(tmp_path, average)
    cfg.default_hooks.checkpoint = None
    cfg.val_dataloader = cfg.val_evaluator = cfg.val_cfg = None
    for before, after in zip(expected, on_ranks(2, cfg, tmp_path, function=trained)):
        for part in ('loss', 'model', 'ema', 'optimizer'):
            assert before[part] == after[part], part


def test_a_checkpoint_of_a_validation_holds_what_is_trained(tmp_path):
    cfg = settings(tmp_path, custom_hooks=[dict(type='SavesWhileValidating')])
    expected = on_ranks(2, cfg, tmp_path, function=trained)
    content = [torch.load(tmp_path / name, weights_only=False)
               for name in ('iter_3.pth', 'validating_3.pth')]
    assert digest(content[0]['state_dict']) == digest(content[1]['state_dict'])
    assert digest(content[0]['mmrepro']['ranks']) == digest(content[1]['mmrepro']['ranks'])
    assert set(content[0]['mmrepro']['ranks']) == {0, 1}
    again = on_ranks(2, settings(tmp_path / 'again'), tmp_path / 'again', function=trained)
    assert [one['model'] for one in expected] == [one['model'] for one in again]


def test_statistics_are_averaged_and_other_buffers_are_those_of_rank_0(run):
    average, folder, _ = run
    prefix = 'model.' if average == 'none' else 'ema.module.'
    content = torch.load(folder / 'iter_9.pth', weights_only=False)
    own = [content['mmrepro']['ranks'][rank]['buffers'] for rank in (0, 1)]
    saved = content['state_dict']
    for name in ('layers.1.running_mean', 'layers.1.running_var'):
        values = [one[prefix + name].double() for one in own]
        assert not torch.equal(*values)
        assert torch.equal(saved[name], ((values[0] + values[1]) / 2).float())
    assert own[0][f'{prefix}seen'] != own[1][f'{prefix}seen']
    assert saved['seen'] == own[0][f'{prefix}seen']


@HOOKS.register_module(force=True)
class ValidatesInVain(Hook):

    def before_train_iter(self, runner, batch_idx, data_batch=None):
        if runner.iter == 5:
            with pytest.raises(KeyError, match='in the middle'):
                runner.val_loop.run()
            runner.model.train()

    def after_val_iter(self, runner, batch_idx, data_batch=None, outputs=None):
        if runner.iter == 5:
            raise KeyError('in the middle of a validation')


def test_an_evaluation_that_fails_leaves_nothing_behind(tmp_path):
    plain = settings(tmp_path)
    in_vain = settings(tmp_path, custom_hooks=[dict(type='ValidatesInVain')])
    for first, second in zip(on_ranks(2, in_vain, tmp_path / 'a', function=trained),
                             on_ranks(2, plain, tmp_path / 'b', function=trained)):
        assert isinstance(first, dict), first[-900:]
        assert first["model"] == second["model"]


@pytest.mark.parametrize('ranks', [2, 3, 5])
def test_the_mean_of_equal_values_is_that_value_and_no_mean_overflows(ranks):
    large, nan = torch.tensor([3e38]), torch.tensor([float('nan')])
    value = torch.tensor([0.1, 1e-38, float('inf'), 3e38, -0.])
    for one in (value, value.double(), value.bfloat16()):
        assert digest(mean_of_ranks([one] * ranks)) == digest(one)
    assert mean_of_ranks([large, large * 1.0625])[0] == large[0] * 1.03125
    assert mean_of_ranks([large, nan]).isnan().all()


@MODELS.register_module(force=True)
class RankState(Small):
    """Besides BatchNorm without synchronisation, a buffer and an attribute of each rank."""

    def __init__(self):
        super().__init__()
        self.register_buffer('seen', torch.zeros(1), persistent=False)
        self.largest = 0.

    def forward(self, x, mode='tensor'):
        self.seen += torch.stack(x).abs().sum()
        self.largest = max(self.largest, float(torch.stack(x).max()))
        return dict(loss=super().forward(x, 'loss')['loss'] * (self.seen + self.largest))


@pytest.fixture(autouse=True)
def adapter():
    mmrepro.keep_attributes(RankState, 'largest', why='of this rank')


def resume_settings(work_dir, accumulate=1):
    cfg = small_settings(work_dir, **{
        'model.type': 'RankState', 'train_dataloader.dataset.size': 48, 'train_cfg.max_epochs': 2,
        'optim_wrapper.clip_grad': dict(max_norm=1.),
        'optim_wrapper.accumulative_counts': accumulate,
        'default_hooks.checkpoint': dict(interval=1, by_epoch=False, max_keep_ckpts=-1),
        'randomness': dict(deterministic=True, diff_rank_seed=True)})
    cfg.val_cfg = cfg.val_dataloader = cfg.val_evaluator = None
    return cfg


@pytest.mark.parametrize('world, points', [(2, (4, 6, 11)), (3, (2, ))])
def test_every_rank_continues_with_its_own_state(world, points, tmp_path):
    expected = on_ranks(world, resume_settings(tmp_path, 3), tmp_path / 'base', function=trained)
    assert len({rank['model'] for rank in expected}) == world, 'ranks hold their own BN'
    assert len({rank['own'] for rank in expected}) == world
    last = len(expected[0]['step'])
    for point in points:
        cfg = resume_settings(tmp_path / str(point), 3)
        cfg.resume, cfg.load_from = True, str(tmp_path / 'base' / f'iter_{point}.pth')
        found = on_ranks(world, cfg, tmp_path / str(point), function=trained)
        for rank, (before, after) in enumerate(zip(expected, found)):
            where = f'rank {rank} of {world}, resumed at {point}'
            assert isinstance(after, dict), after
            assert after['step'] == list(range(point, last)), where
            for key in ('data', 'loss'):
                assert after[key] == before[key][point:], f'{where}: {key}'
            for key in ('model', 'own', 'ema', 'optimizer'):
                assert after[key] == before[key], f'{where}: {key}'


def test_buffers_of_rank_0_are_taken_when_they_were_without_the_resume(tmp_path):
    cfg = resume_settings(tmp_path, 3)
    cfg.train_cfg.max_epochs = 1
    cfg.model_wrapper_cfg = dict(type='MMDistributedDataParallel', find_unused_parameters=True)
    expected = on_ranks(2, copy.deepcopy(cfg), tmp_path, function=trained)
    assert all(isinstance(rank, dict) for rank in expected), expected  # with step checks
    cfg.resume, cfg.load_from = True, str(tmp_path / 'iter_2.pth')
    for before, after in zip(expected, on_ranks(2, cfg, tmp_path / 'again', function=trained)):
        assert after['loss'] == before['loss'][2:] and after['model'] == before['model']


@MODELS.register_module(force=True)
class UsedLateOnRank1(RankState):
    """Rank 1 uses a weight in the last iteration of a cycle of accumulation only."""

    def __init__(self):
        super().__init__()
        self.extra = torch.nn.Parameter(torch.ones(1))

    def forward(self, x, mode='tensor'):
        loss = super().forward(x, mode)['loss']
        if get_rank() == 0 or MessageHub.get_current_instance().get_info('iter') % 3 == 2:
            loss = loss + self.extra.square().sum() * torch.stack(x).abs().mean()
        return dict(loss=loss)


def test_a_gradient_that_one_rank_has_is_not_given_to_another(tmp_path):
    cfg = resume_settings(tmp_path, 3)
    cfg.model.type, cfg.train_cfg.max_epochs = 'UsedLateOnRank1', 1
    cfg.model_wrapper_cfg = dict(type='MMDistributedDataParallel', find_unused_parameters=True,
                                 broadcast_buffers=False)
    expected = on_ranks(2, copy.deepcopy(cfg), tmp_path, function=trained)
    cfg.resume, cfg.load_from = True, str(tmp_path / 'iter_2.pth')
    for before, after in zip(expected, on_ranks(2, cfg, tmp_path / 'again', function=trained)):
        assert isinstance(after, dict), after
        assert after['model'] == before['model']


def with_a_disk_of_its_own(rank, world, port, cfg, work_dir):
    """Rank 1 has no checkpoint, another one, or one image less."""
    from mmrepro.checkpoint import choosing
    if rank and cfg.get('resume'):
        choosing.newest_good = lambda *args: (None, [])
    elif rank and cfg.get('load_from'):
        files.safe_load = lambda path, *args: torch.load(
            path.replace('iter_3', 'iter_4'), weights_only=False)
    elif rank:
        Points.__len__ = lambda self: self.size - 1
    return as_rank(rank, world, port, cfg, work_dir)


@pytest.mark.parametrize('changes, said', [
    (dict(resume=True), 'has no checkpoint of iteration 3; share the work directory'),
    (dict(load_from='iter_3.pth'), 'weights at the start: rank 0 has '),
    ({}, 'train_samples: rank 0 has 48, rank 1 has 47')])
def test_ranks_that_would_begin_differently_all_stop(changes, said, tmp_path):
    cfg = resume_settings(tmp_path)
    cfg.randomness.update(seed=5, self_checks=dict(steps=0, samples=0))
    cfg.train_cfg.max_epochs = 1
    on_ranks(2, cfg, tmp_path)
    (tmp_path / 'last_checkpoint').write_text(str(tmp_path / 'iter_3.pth'))
    cfg.merge_from_dict(changes)
    cfg.load_from = cfg.get('load_from') and str(tmp_path / cfg.load_from)
    for text in on_ranks(2, cfg, tmp_path, function=with_a_disk_of_its_own):
        assert isinstance(text, str) and 'AgreementError' in text and said in text, text


def test_ranks_that_are_equal_hand_nothing_over(tmp_path):
    cfg = resume_settings(tmp_path)
    cfg.model.type = 'NoisyLine'
    cfg.custom_hooks = []
    on_ranks(2, cfg, tmp_path)
    saved = torch.load(tmp_path / 'iter_3.pth', weights_only=False)
    assert saved['mmrepro']['ranks'] == {}


def test_every_rank_writes_its_fingerprints_and_continues_them(tmp_path):
    from mmrepro.fingerprint.reader import read_run
    cfg = resume_settings(tmp_path / 'run')
    cfg.custom_hooks = [dict(type='FingerprintHook')]
    on_ranks(2, cfg, tmp_path / 'run')
    first, second = (read_run(str(tmp_path / 'run')).ranks[rank].steps for rank in (0, 1))
    assert list(first) == list(second) == list(range(12))
    for one, other in zip(first.values(), second.values()):
        assert one['parameters'] == other['parameters'] and one['gradients'] == other['gradients']
        assert one['optimizer'] == other['optimizer']
        assert not set(one['batch']['positions']) & set(other['batch']['positions'])
        assert one['buffers'] != other['buffers'], 'BatchNorm is not synchronised here'
    cfg.resume, cfg.load_from = True, str(tmp_path / 'run' / 'iter_5.pth')
    on_ranks(2, cfg, tmp_path / 'run')
    run = read_run(str(tmp_path / 'run'))
    assert [manifest['resumed_from'] for manifest in run.manifests] == [None, cfg.load_from]
    again = run.ranks
    assert (again[0].steps, again[1].steps) == (first, second)
    assert [len(again[rank].starts) for rank in (0, 1)] == [2, 2]
    assert not any('differ' in note for rank in (0, 1) for note in again[rank].notes)


def counted_on_rank(rank, world, port, cfg, work_dir):
    from counted import Counted
    counted = Counted()
    as_rank(rank, world, port, cfg, work_dir)
    return counted.calls['check'], counted.calls['state']


def test_every_rank_checks_a_checkpoint_once_and_collects_its_state_once(tmp_path):
    cfg = resume_settings(tmp_path)
    for _, states in on_ranks(2, copy.deepcopy(cfg), tmp_path, function=counted_on_rank):
        assert states == 12
    cfg.resume, cfg.load_from = True, str(tmp_path / 'iter_10.pth')
    assert on_ranks(2, cfg, tmp_path, function=counted_on_rank) == [(1, 2)] * 2
