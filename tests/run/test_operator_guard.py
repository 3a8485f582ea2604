"""The hook that watches some steps of a run; the CPU plays the device here."""
import pytest
import small_runs
import torch
from mmengine.registry import MODELS
from mmengine.runner import Runner

from mmrepro import determinism
from mmrepro.errors import UnknownOperatorError
from mmrepro.ops.guard import OperatorGuard
from mmrepro.run.hooks.self_check import OperatorGuardHook

_library = torch.library.Library('passers_by', 'DEF')
_library.define('scale(Tensor x, float by) -> Tensor')
_library.impl('scale', lambda x, by: x * by, 'CPU')


@pytest.fixture
def trained(tmp_path, monkeypatch):
    @MODELS.register_module(name='StrangeLine', force=True)
    class StrangeLine(small_runs.NoisyLine):
        def forward(self, x, mode='tensor'):
            out = super().forward(x, mode)
            return {name: torch.ops.passers_by.scale(value.detach(), 1.) * 0 + value
                    for name, value in out.items()} if mode == 'loss' else out

    def run(model='StrangeLine', **kwargs):
        # not deterministic: no guard by itself
        cfg = small_runs.config(tmp_path, **{'randomness': dict(seed=3), **kwargs})
        cfg.model.type = model
        cfg.default_hooks.checkpoint = None
        runner = Runner.from_cfg(cfg)
        steps, told = [], []
        train_step = runner.model.train_step
        runner.logger.warning = told.append
        watch = OperatorGuard.watch
        with monkeypatch.context() as patch:
            patch.setattr(OperatorGuard, 'watch',
                          lambda self: steps.append(runner.iter) or watch(self))
            try:
                runner.train()
            finally:
                determinism.disable()
        assert runner.model.train_step == train_step
        return runner, steps, [text for text in told if 'passers_by' in str(text)]

    return run


def test_the_hook_watches_ever_rarer_and_changes_no_bit(trained):
    runner, steps, told = trained(custom_hooks=[dict(type='OperatorGuardHook', devices=['cpu'])])
    assert steps == [0, 1, 3, 7] and len(told) == 1
    assert 'passers_by::scale' in told[0] and '(StrangeLine)' in told[0]
    plain, steps, told = trained('NoisyLine')
    assert steps == [] and told == []
    for a, b in zip(runner.model.parameters(), plain.model.parameters()):
        assert torch.equal(a, b)


def test_the_hook_can_refuse(trained):
    hook = dict(type='OperatorGuardHook', devices=['cpu'], on_unknown='error')
    with pytest.raises(UnknownOperatorError, match='passers_by::scale'):
        trained(custom_hooks=[hook])
    trained(custom_hooks=[dict(hook, allow=['passers_by::*'])])


def test_deterministic_runs_have_the_hook_and_others_do_not(trained):
    for deterministic, count in ((True, 1), ('warn', 1), (False, 0)):
        runner = trained('NoisyLine', randomness=dict(seed=1, deterministic=deterministic))[0]
        assert sum(isinstance(hook, OperatorGuardHook) for hook in runner.hooks) == count
    own = [dict(type='OperatorGuardHook', allow=['a::b'])]
    runner = trained('NoisyLine', randomness=dict(seed=1, deterministic=True), custom_hooks=own)[0]
    hook, = [hook for hook in runner.hooks if isinstance(hook, OperatorGuardHook)]
    assert hook._allow == ('a::b',)


@pytest.mark.parametrize('setting', ['allow', 'devices'])
def test_a_text_in_place_of_a_list_is_refused(setting):
    """Its letters would be names of operators, or of devices that no run has."""
    with pytest.raises(ValueError, match=f"{setting}='cuda': expected a list"):
        OperatorGuardHook(**{setting: 'cuda'})
