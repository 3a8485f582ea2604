"""A validation that changes the training is found, and what it has changed is named."""
import pytest
import torch
from faults import tiny
from mmengine.registry import MODELS
from mmengine.runner import Runner

from mmrepro.errors import ValidationChangesError

pytestmark = pytest.mark.filterwarnings('ignore')


class Predicting(tiny.Tiny):
    def forward(self, inputs, label, mode='tensor'):
        if mode == 'predict':
            self.predicted()
        return super().forward(inputs, label, mode)


@MODELS.register_module(force=True)
class Writes(Predicting):
    @torch.no_grad()
    def predicted(self):
        self.head.fc.bias += 0.1


@MODELS.register_module(force=True)
class Counts(Predicting):
    """The training reads what predictions count."""

    def predicted(self):
        self.head.scale += 0.1


@MODELS.register_module(force=True)
class Renames(Predicting):
    """Gives a part a second name."""

    def predicted(self):
        self.head.features = self.backbone


def runner_of(work_dir, model, deterministic=True):
    cfg = tiny.tiny(work_dir)
    tiny.validating(cfg)
    cfg.model.type, cfg.train_cfg.val_interval = model, 1
    cfg.randomness.deterministic, cfg.log_level = deterministic, 'WARNING'
    cfg.custom_hooks = [dict(type='EMAHook')]
    runner = Runner.from_cfg(cfg)
    runner.said = []
    runner.logger.warning = runner.said.append
    return runner


def test_changed_weights_end_the_run(tmp_path):
    """EMAHook has put its averages into the model, and these change."""
    with pytest.raises(ValidationChangesError, match='the validation at iteration 4.*head.fc.bias'):
        runner_of(tmp_path, 'Writes').train()


@pytest.mark.parametrize('model, mode, said, times', [
    ('Counts', True, 'has changed head.scale', 1), ('Writes', 'warn', 'head.fc.bias', 1),
    ('Tiny', True, 'the validation', 0), ('Renames', True, 'the validation', 0)])
def test_what_a_validation_has_changed_is_a_warning_once(tmp_path, model, mode, said, times):
    """Attributes, or weights where warnings were asked for; an ordinary one changes nothing."""
    runner = runner_of(tmp_path, model, mode)
    runner.train()
    assert len([line for line in runner.said if said in line]) == times
