"""Mistakes in a config are one line with the key, the value, and what is wrong with it."""
import socket
import sys

import pytest
import torch
from demo_runs import small
from mmengine.dist import dist
from mmengine.evaluator import BaseMetric
from mmengine.model import BaseModel
from mmengine.registry import DATASETS, METRICS, MODELS
from mmengine.runner import Runner
from small_runs import NoisyLine, Points, config, validating
from torch.distributed import distributed_c10d
from unformatted import formatted

from mmrepro.cli.arguments import on_each_rank, training_parser
from mmrepro.cli.mistakes import explained
from mmrepro.errors import ConfigError, SampleError, TrainingError


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


@DATASETS.register_module(force=True)
class DifferentSizes(Points):
    def __getitem__(self, i):
        return dict(x=torch.ones(1 + i))


@MODELS.register_module(force=True)
class WithoutALoss(NoisyLine):
    def forward(self, x, mode='tensor'):
        return dict(value=super().forward(x, mode)['loss'])


@MODELS.register_module(force=True)
class Frozen(NoisyLine):
    def __init__(self):
        super().__init__()
        self.requires_grad_(False)


@METRICS.register_module(force=True)
class Value(BaseMetric):
    def process(self, data_batch, data_samples):
        self.results.append(1)

    def compute_metrics(self, results):
        return dict(value=1)


@METRICS.register_module(force=True)
class ReturnsNothing(Value):
    def compute_metrics(self, results):
        return None


@METRICS.register_module(force=True)
class OnAnotherMachine(Value):
    """Of rank 1, which does not see the folder that rank 0 has made."""

    def evaluate(self, size):
        def receive(tensor, src):
            name = b'.dist_test/of_rank_0'
            tensor[:len(name)] = torch.tensor(bytearray(name))

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(dist, 'get_dist_info', lambda: (1, 2))
            patch.setattr(dist, 'broadcast', receive)
            return super().evaluate(size)


def said(cfg):
    """Return the line on what training a config raises, and check that the cause is kept."""
    with pytest.raises((ConfigError, SampleError, TrainingError)) as caught:
        on_each_rank(cfg, training_parser('train', ''), lambda runner: runner.train())
    assert caught.value.__cause__ is not None and '\n' not in str(caught.value)
    return str(caught.value)


# keys and their values -> what is said
MISTAKES = {
    'a number that is text': (dict(train_cfg__max_epochs='many'), ConfigError,
                              "train_cfg.max_epochs='many': ValueError: invalid literal for int"),
    'an optimizer that does not exist': (
        dict(optim_wrapper__optimizer__type='Adamm'), ConfigError,
        "Adamm is not in the optimizer registry; did you mean 'Adam'? If not, import the module"),
    'a sampler that does not exist': (  # the name of its registry has a space
        dict(train_dataloader__sampler__type='DefaultSamler'), ConfigError,
        "DefaultSamler is not in the mmengine::data sampler registry; did you mean 'DefaultSampl"),
    'an argument that it does not take': (
        dict(optim_wrapper__optimizer__momentun=0.9), ConfigError,
        'optim_wrapper.optimizer.momentun=0.9: TypeError: SGD.__init__() got an unexpected'),
    'a learning rate that is text': (
        dict(optim_wrapper__optimizer__lr='fast'), ConfigError, "'lr': 'fast'"),
    'an argument of the model': (
        dict(model__deepth=50), ConfigError, 'model.deepth=50: TypeError: '),
    'settings of a hook': (
        dict(custom_hooks=[dict(type='EMAHook', momentun=.1)]), ConfigError,
        'custom_hooks[0].momentun=0.1: TypeError: '),
    'a metric that no validation has': (
        dict(default_hooks__checkpoint__save_best='coco/bbox_mAP', val=True), ConfigError,
        "default_hooks.checkpoint.save_best='coco/bbox_mAP': KeyError: 'coco/bbox_mAP'; the "
        'validation has value'),
    'an interval of zero': (
        dict(train_cfg__val_interval=0, val=True), ConfigError,
        'train_cfg.val_interval=0: ZeroDivisionError: '),
    'half a validation': (
        dict(val_evaluator=None, val=True), ConfigError,
        'val_dataloader, val_cfg, and val_evaluator should be either all None or not None; None: '
        'val_evaluator'),
    'a metric without a result': (
        dict(val_evaluator=dict(type='ReturnsNothing'), val=True), ConfigError,
        "val_evaluator = {'type': 'ReturnsNothing'}: AttributeError: 'NoneType'"),
    'a loss of another name': (
        dict(model__type='WithoutALoss'), ConfigError,
        "the model has returned no loss: MMEngine adds up the tensors with 'loss' in their name"),
    'a frozen model': (
        dict(model__type='Frozen'), ConfigError,
        'the loss depends on no parameter that is trained'),
    'samples of different sizes': (
        dict(train_dataloader__dataset__type='DifferentSizes',
             train_dataloader__collate_fn=dict(type='default_collate')), SampleError,
        'of DifferentSizes cannot be put together as a batch: default_collate raised RuntimeError: '
        'stack expects each tensor to be equal size'),
    'a number of classes': (
        dict(model__type='ThreeClasses', train_dataloader__dataset__metainfo=True), TrainingError,
        'model.head.num_classes is 3, and the dataset has 4 classes: RuntimeError: Class values'),
}


def with_changes(folder, changes):
    changes = dict(changes)
    cfg = config(folder)
    if changes.pop('val', False):
        cfg = validating(cfg)
        cfg.val_evaluator = dict(type='Value')
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


def test_a_config_without_a_test_says_what_it_lacks(tmp_path):
    with pytest.raises(ConfigError, match='Please provide `test_dataloader`, `test_cfg` and'):
        on_each_rank(config(tmp_path), training_parser('test', ''), lambda runner: runner.test())


def test_a_file_of_a_metric_is_named(tmp_path):
    cfg = validating(config(tmp_path))
    cfg.val_evaluator = dict(type='mmdet.CocoMetric', ann_file='not/here.json')
    assert said(cfg).startswith("val_evaluator.ann_file='not/here.json': FileNotFoundError: ")


def test_machines_that_share_no_folder_for_results_are_told(tmp_path):
    cfg = validating(config(tmp_path))
    cfg.val_evaluator = dict(type='OnAnotherMachine')
    assert "of rank 0 is not on this machine (FileNotFoundError: " in said(cfg)
    assert ".dist_test/of_rank_0/part_1.pkl" in said(cfg)


def test_samples_that_are_no_data_samples_are_said(tmp_path):
    cfg = config(tmp_path)
    cfg.train_dataloader.dataset.type = 'Ragged'
    assert 'end the pipeline with PackDetInputs' in said(cfg)


def test_what_is_no_mistake_in_the_config_keeps_its_traceback(tmp_path):
    cfg = config(tmp_path)
    runner = Runner.from_cfg(cfg)
    assert explained(cfg, RuntimeError('a layer of the user'), runner) is None
    assert explained(cfg, FileNotFoundError(2, 'No such file', 'x'), runner) is None


def test_a_folder_that_refuses_files_though_its_permissions_allow_them_is_named():
    try:
        raise PermissionError(1, 'Operation not permitted', '/shared/run/20260101_000000')
    except PermissionError as error:
        assert explained(dict(work_dir='/shared/other'), error) is None
        said = str(explained(dict(work_dir='/shared/run'), error))
    assert said.startswith(
        '/shared/run/20260101_000000 cannot be written or read: Operation not permitted')


def test_ranks_that_do_not_come_are_said_with_the_place_where_they_were_to_meet(
        tmp_path, monkeypatch):
    with socket.socket() as free:
        free.bind(('127.0.0.1', 0))
        port = str(free.getsockname()[1])
    for name, value in dict(RANK='0', WORLD_SIZE='2', LOCAL_RANK='0', MASTER_ADDR='127.0.0.1',
                            MASTER_PORT=port).items():
        monkeypatch.setenv(name, value)
    # torch counts a group that has failed, and processes that are forked later would count on
    monkeypatch.setattr(distributed_c10d._world, 'group_count', 0)
    cfg = config(tmp_path)
    cfg.launcher, cfg.env_cfg = 'pytorch', dict(dist_cfg=dict(timeout=1))
    text = said(cfg)
    assert text.startswith('the ranks have not found each other: DistStoreError: Timed out')
    assert f'(RANK=0, WORLD_SIZE=2, MASTER_ADDR=127.0.0.1, MASTER_PORT={port})' in text


def test_a_function_that_no_file_can_hold_is_named(tmp_path):
    cfg = formatted(config(tmp_path))
    cfg.train_dataloader.collate_fn = lambda batch: batch
    assert said(cfg).startswith('train_dataloader.collate_fn=<function')


def test_what_needs_a_package_that_is_not_installed_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, 'mlflow', None)
    cfg = config(tmp_path)
    cfg.visualizer = dict(type='Visualizer', vis_backends=[dict(type='MLflowVisBackend')])
    assert said(cfg).startswith(
        "visualizer.vis_backends[0].type='MLflowVisBackend': ImportError: Please run \"pip install")


def test_a_layer_that_does_not_fit_is_named(data_root, tmp_path):
    cfg = small('rtmdet_tiny', data_root)
    cfg.work_dir = str(tmp_path)
    cfg.model.neck.in_channels = [96, 192, 192]
    assert said(cfg).startswith('model.neck.reduce_layers.0.conv (Conv2d) does not fit what the '
                                'layer before it returns: RuntimeError: Given groups=1, weight of')
