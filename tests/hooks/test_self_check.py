"""Steps of a run are repeated: which, on how many ranks, and what the run says of it."""
import json

import pytest
import torch.distributed as dist
from checked_runs import bits, config, finish, registered
from demo_runs import MODELS as DETECTORS
from demo_runs import small
from faults import tiny
from harness import Child, train
from mmengine.hooks import Hook
from mmengine.runner import Runner
from ranks import on_ranks

from mmrepro.facts.compatibility import HARMLESS
from mmrepro.fingerprint.divergence import first_divergence
from mmrepro.fingerprint.manifest import compare_manifests, read_manifest
from mmrepro.fingerprint.reader import read_run
from mmrepro.hooks import SelfCheckHook


def test_a_resumed_run_checks_the_same_iterations(tmp_path, monkeypatch):
    due = []
    monkeypatch.setattr(SelfCheckHook, '_done', lambda self, runner, problem: due.append(
        runner.iter + 1))
    changes = dict(default_hooks=dict(checkpoint=dict(
        _delete_=True, type='CheckpointHook', interval=1, by_epoch=False, max_keep_ckpts=-1)))
    whole = finish(config(tmp_path, checks=7, **changes))
    assert due == [1, 2, 4, 7, 8]
    due.clear()
    resumed = finish(config(tmp_path, checks=7, resume=True,
                            load_from=str(tmp_path / 'iter_3.pth'), **changes))
    assert due == [4, 7, 8] and bits(whole) == bits(resumed)


def last_lines(work_dir):
    """Return what the log says of the checks and of the outcome, without the time."""
    log, = work_dir.glob('*/*.log')
    return [line.split(' - ')[-1] for line in log.read_text().rstrip().splitlines()[-2:]]


@pytest.mark.parametrize('checks, says', [
    (1000, '5 samples and 4 steps were repeated: same bits (not repeated: QuietHook)'),
    (0, '5 samples and 0 steps were repeated: same bits (steps are not repeated: '
        'randomness.self_checks.steps=0; not repeated: QuietHook)')])
def test_the_log_counts_at_its_end(checks, says, tmp_path):
    finish(config(tmp_path, checks=checks, log_level='INFO'))
    assert last_lines(tmp_path)[0] == says


def test_nothing_is_said_without_deterministic(tmp_path):
    runner = finish(config(tmp_path, randomness=dict(deterministic=False)))
    assert not any(isinstance(hook, SelfCheckHook) for hook in runner.hooks)


def test_the_count_is_in_manifest_and_fingerprints_and_no_difference(tmp_path):
    for checks in (1, 1000):
        finish(config(tmp_path / str(checks), checks=checks,
                      custom_hooks=[dict(type='FingerprintHook')]))
    runs = [read_run(str(tmp_path / str(checks))) for checks in (1, 1000)]
    assert [run.manifests[0]['self_checks']['steps'] for run in runs] == [8, 4]
    ends = [json.loads((tmp_path / str(checks) / 'mmrepro' / 'fingerprints.rank0.jsonl')
                       .read_text().splitlines()[-1]) for checks in (1, 1000)]
    assert [end['self_checks']['steps'] for end in ends] == [8, 4]
    assert first_divergence(runs[0].ranks, runs[1].ranks) is None
    differences = compare_manifests(*(read_manifest(run.work_dir) for run in runs))
    assert {one.severity for one in differences} == {HARMLESS}
    assert not any(one.name.startswith('self_checks') for one in differences)


class NoCopy:
    def __deepcopy__(self, memo):
        raise TypeError('it holds a lock')


def test_a_batch_that_cannot_be_copied_is_said(tmp_path):
    cfg = config(tmp_path, log_level='INFO')

    class Odd(Hook):
        def before_train_iter(self, runner, batch_idx, data_batch=None):
            data_batch['label'].append(NoCopy())
            data_batch['label'].pop() if runner.iter else None

    runner = Runner.from_cfg(cfg)
    runner.model.data_preprocessor.register_forward_pre_hook(
        lambda module, args: args[0]['label'].__delitem__(slice(2, None)))
    runner.register_hook(Odd())
    runner.train()
    assert last_lines(tmp_path)[0] == (
        '5 samples and 0 steps were repeated: same bits (steps are not repeated: a batch cannot be '
        'copied: TypeError: it holds a lock; not repeated: QuietHook, Odd)')


@registered
class Lopsided(tiny.Tiny):
    """An attribute changes on one rank only, and reaches nothing."""
    calls = 0

    def forward(self, inputs, label, mode='tensor'):
        self.calls += dist.get_rank()
        return super().forward(inputs, label, mode)


def test_no_bit_changes_on_ranks(tmp_path):
    runs = [on_ranks(3, config(tmp_path / str(checks), model='Lopsided', checks=checks,
                               optim_wrapper=dict(accumulative_counts=2)), tmp_path / str(checks))
            for checks in (1, 0)]
    assert runs[0] == runs[1] and len(runs[0][0]['step']) == 4


def test_all_ranks_stop_and_the_one_that_differs_is_named(tmp_path):
    messages = on_ranks(2, config(tmp_path, model='RankDiffers'), tmp_path)
    for message in messages:
        assert 'StepDiffersError' in message and 'of iteration 0 (' in message
        assert 'rank 1: first difference: loss noise: ' in message
        assert 'Ranks that differ: 1 of 2.' in message
        assert 'Rank 1: A and B are two more passes' in message and 'entropy' in message
        assert 'rank 0: first difference: loss' not in message
    assert {path.name for path in (tmp_path / 'mmrepro').iterdir()} == {
        'step_check.iteration0.rank0.json', 'step_check.iteration0.rank1.json'}


@pytest.mark.nightly
@pytest.mark.parametrize('name', [*DETECTORS, 'retinanet_r50_fpn'])
def test_detectors_repeat_their_steps_and_change_no_bit(name, data_root, tmp_path):
    import mmdet.models  # noqa: F401
    runs = []
    for checks in (1, 0):
        cfg = small(name, data_root)
        cfg.randomness.self_checks = dict(steps=checks)
        runs.append(Child(train, cfg, tmp_path / str(checks), False).result())
    assert runs[0] == runs[1]
