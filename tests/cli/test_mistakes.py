"""Mistakes in a config are one line with the key, the value, and what is wrong with it."""
import pytest
import torch
from mmengine.model import BaseModel
from mmengine.registry import DATASETS, MODELS
from mmengine.runner import Runner
from small_runs import Points, config, validating

from mmrepro.cli.arguments import on_each_rank, training_parser
from mmrepro.cli.mistakes import explained
from mmrepro.errors import ConfigError, TrainingError


@MODELS.register_module(force=True)
class ThreeClasses(BaseModel):
    """Like a head of MMDetection: labels index a table."""

    def __init__(self):
        super().__init__()
        self.head = torch.nn.Linear(2, 3)
        self.head.num_classes = 3

    def forward(self, x, mode='tensor'):
        target = torch.full((len(x), ), 3)
        try:
            return dict(loss=torch.nn.functional.cross_entropy(self.head(torch.stack(x)), target))
        except IndexError as error:
            raise RuntimeError('Class values must be smaller than num_classes.') from error


@DATASETS.register_module(force=True)
class FourClasses(Points):
    metainfo = dict(classes=('a', 'b', 'c', 'd'))


@DATASETS.register_module(force=True)
class Ragged(Points):
    def __getitem__(self, i):
        return [1] * (1 + i)


def said(cfg):
    """Return the line on what training a config raises, and check that the cause is kept."""
    with pytest.raises((ConfigError, TrainingError)) as caught:
        on_each_rank(cfg, training_parser('train', ''), lambda runner: runner.train())
    assert caught.value.__cause__ is not None and '\n' not in str(caught.value)
    return str(caught.value)


# keys and their values -> what is said
MISTAKES = {
    'a number that is text': (dict(train_cfg__max_epochs='many'), ConfigError,
                              "train_cfg.max_epochs='many': ValueError: invalid literal for int"),
    'an optimizer that does not exist': (
        dict(optim_wrapper__optimizer__type='Adamm'), ConfigError,
        "optim_wrapper.optimizer.type='Adamm' is not in the optimizer registry; did you mean 'Ada"),
    'an argument that it does not take': (
        dict(optim_wrapper__optimizer__momentun=0.9), ConfigError,
        'optim_wrapper.optimizer.momentun=0.9: TypeError: SGD.__init__() got an unexpected'),
    'a learning rate that is text': (
        dict(optim_wrapper__optimizer__lr='fast'), ConfigError, "'lr': 'fast'"),
    'an argument of the model': (
        dict(model__deepth=50), ConfigError, 'model.deepth=50: TypeError: '),
    'a number of classes': (
        dict(model__type='ThreeClasses', train_dataloader__dataset__metainfo=True), TrainingError,
        'model.head.num_classes is 3, and the dataset has 4 classes: RuntimeError: Class values'),
}


def with_changes(folder, changes):
    cfg = config(folder)
    cfg.merge_from_dict({name.replace('__', '.'): value for name, value in changes.items()})
    if cfg.train_dataloader.dataset.pop('metainfo', None):
        cfg.train_dataloader.dataset.type = 'FourClasses'
    return cfg


@pytest.mark.parametrize('name', MISTAKES)
def test_a_mistake_is_one_line(name, tmp_path):
    changes, kind, text = MISTAKES[name]
    cfg = with_changes(tmp_path, changes)
    with pytest.raises(kind):
        on_each_rank(cfg, training_parser('train', ''), lambda runner: runner.train())
    assert text in said(with_changes(tmp_path, changes))


def test_a_file_of_a_metric_is_named(tmp_path):
    cfg = validating(config(tmp_path))
    cfg.val_evaluator = dict(type='mmdet.CocoMetric', ann_file='not/here.json')
    assert said(cfg).startswith("val_evaluator.ann_file='not/here.json': FileNotFoundError: ")


def test_samples_that_are_no_data_samples_are_said(tmp_path):
    cfg = config(tmp_path)
    cfg.train_dataloader.dataset.type = 'Ragged'
    assert 'end the pipeline with PackDetInputs' in said(cfg)


def test_what_is_no_mistake_in_the_config_keeps_its_traceback(tmp_path):
    cfg = config(tmp_path)
    runner = Runner.from_cfg(cfg)
    assert explained(cfg, RuntimeError('a layer of the user'), runner) is None
    assert explained(cfg, FileNotFoundError(2, 'No such file', 'x'), runner) is None
