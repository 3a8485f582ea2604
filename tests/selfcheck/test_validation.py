"""A validation that changes the training is found, and what it has changed is named."""
import pytest
from faults import tiny
from mmengine.registry import MODELS
from mmengine.runner import Runner
from small_runs import warnings_of

from mmrepro.errors import ValidationChangesError

pytestmark = pytest.mark.filterwarnings('ignore')


# what a model does when it predicts
PREDICTING = {
    'nothing': lambda model: None,
    'writes': lambda model: model.head.fc.bias.data.add_(0.1),
    # the training reads what predictions count
    'counts': lambda model: setattr(model.head, 'scale', model.head.scale + 0.1),
    'renames': lambda model: setattr(model.head, 'features', model.backbone)}


@MODELS.register_module(force=True)
class Predicting(tiny.Tiny):
    def __init__(self, does, **kwargs):
        super().__init__(**kwargs)
        self.does = does

    def forward(self, inputs, label, mode='tensor'):
        if mode == 'predict':
            PREDICTING[self.does](self)
        return super().forward(inputs, label, mode)


def runner_of(work_dir, does, deterministic=True):
    cfg = tiny.tiny(work_dir)
    tiny.validating(cfg)
    cfg.model.update(type='Predicting', does=does)
    cfg.train_cfg.val_interval = 1
    cfg.randomness.deterministic, cfg.log_level = deterministic, 'WARNING'
    cfg.custom_hooks = [dict(type='EMAHook')]
    return Runner.from_cfg(cfg)


def test_changed_weights_end_the_run(tmp_path):
    """EMAHook has put its averages into the model, and these change."""
    with pytest.raises(ValidationChangesError, match='the validation at iteration 4.*head.fc.bias'):
        runner_of(tmp_path, 'writes').train()


@pytest.mark.parametrize('does, mode, said, times', [
    ('counts', True, 'has changed head.scale', 1), ('writes', 'warn', 'head.fc.bias', 2),
    ('nothing', True, 'the validation', 0), ('renames', True, 'the validation', 0)])
def test_what_a_validation_has_changed_is_a_warning(tmp_path, does, mode, said, times):
    """Attributes once, weights at both validations where asked for; an ordinary one, nothing."""
    warned = warnings_of(runner_of(tmp_path, does, mode))
    assert len([line for line in warned if said in line]) == times
