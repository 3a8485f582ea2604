"""Loaders, samplers, and hooks that change the data or draw."""
from __future__ import annotations

import random
import threading

import numpy as np
import torch
from faults.tiny import TinyData
from mmcv.transforms import BaseTransform
from mmengine.dataset import DefaultSampler, pseudo_collate
from mmengine.hooks import Hook
from mmengine.registry import DATASETS, LOOPS, TRANSFORMS
from mmengine.runner import EpochBasedTrainLoop, IterBasedTrainLoop, Runner
from torch.utils.data import DataLoader, Sampler

from .setup import REFUSED, SAME, WARNED, by_iterations, hook, setup


@TRANSFORMS.register_module(force=True)
class Weaken(BaseTransform):
    """What a hook switches off or adds."""

    def __init__(self):
        self.rng = np.random.default_rng(2)

    def transform(self, results):
        results['img'] = results['img'] * .5 + self.rng.normal()
        return results


def leaf(runner):
    return runner.train_dataloader.dataset


class SwitchBefore(Hook):
    """As YOLOXModeSwitchHook: another pipeline, from the start on."""

    def __init__(self, event, how='replace', at=0):
        self.how, self.at = how, at
        setattr(self, event, self.switch)

    def switch(self, runner, **kwargs):
        if runner.epoch != self.at:
            return
        transforms = leaf(runner).pipeline.transforms
        if self.how == 'append':
            transforms.insert(1, Weaken())
        else:
            leaf(runner).pipeline.transforms = [transforms[0], Weaken(), transforms[-1]]
        if getattr(runner.train_dataloader, 'persistent_workers', False):
            runner.train_dataloader._DataLoader__initialized = False
            runner.train_dataloader._iterator = None
            runner.train_dataloader._DataLoader__initialized = True


@setup(SAME)
def a_hook_that_switches_the_pipeline_before_training_by_iterations(cfg):
    by_iterations(cfg)
    hook(SwitchBefore, event='before_train')(cfg)


@setup(SAME)
def a_hook_that_switches_the_pipeline_before_the_first_epoch_of_iterations(cfg):
    by_iterations(cfg)
    hook(SwitchBefore, event='before_train_epoch')(cfg)


@setup(SAME)
def a_hook_that_switches_the_pipeline_before_the_first_epoch(cfg):
    hook(SwitchBefore, event='before_train_epoch')(cfg)


@setup(SAME, variations=('workers', ))  # a resumed run begins with the pipeline of the config
def a_hook_that_appends_to_the_pipeline(cfg):
    hook(SwitchBefore, event='before_train_epoch', how='append', at=1)(cfg)


@setup(SAME, variations=('workers', ))
def a_hook_that_switches_with_persistent_workers(cfg):
    hook(SwitchBefore, event='before_train_epoch', at=1)(cfg)
    cfg.train_dataloader.persistent_workers = cfg.train_dataloader.num_workers > 0


class BuildsALoader(Hook):
    """Trains on the batch of a second loader as well."""

    def before_train(self, runner):
        runner.second = runner.build_dataloader(dict(
            batch_size=2, num_workers=0, dataset=dict(type='TinyData', serialize_data=False,
                                                      pipeline=runner.cfg.pipeline),
            sampler=dict(type='DefaultSampler', shuffle=True)))

    def before_train_iter(self, runner, batch_idx, data_batch=None):
        # all of it, at every iteration: its passes are those of the training
        labels = [int(label) for batch in runner.second for label in batch['label']]
        assert len(labels) == 8, f'{len(labels)} samples of 8'
        data_batch['inputs'][0] = data_batch['inputs'][0] + labels[0]


@setup(SAME)
def a_hook_that_builds_a_loader(cfg):
    cfg.pipeline = cfg.train_dataloader.dataset.pipeline
    hook(BuildsALoader)(cfg)


class IteratesTheLoader(Hook):
    def before_train_epoch(self, runner):
        self.labels = [int(label) for batch in runner.train_dataloader for label in batch['label']]


@setup(SAME)
def a_hook_that_iterates_the_training_loader(cfg):
    hook(IteratesTheLoader)(cfg)


@setup(SAME)
def a_hook_that_draws_after_all_others(cfg):
    hook(DrawsLate, priority='LOWEST')(cfg)


class DrawsLate(Hook):
    def before_train_iter(self, runner, batch_idx, data_batch=None):
        if batch_idx % 2 and not runner._resume:
            random.random(), np.random.rand(), torch.rand(2)


@LOOPS.register_module(force=True)
class DrawingLoop(EpochBasedTrainLoop):
    """Draws before the hooks of an iteration are called; not in resumed runs."""

    def run_iter(self, idx, data_batch):
        if not self.runner._resume:
            random.random(), np.random.rand(), torch.rand(2)
        super().run_iter(idx, data_batch)


@LOOPS.register_module(force=True)
class ScalingLoop(IterBasedTrainLoop):
    """Scales the images by what it draws."""

    def run_iter(self, data_batch):
        data_batch['inputs'] = [one * random.random() for one in data_batch['inputs']]
        super().run_iter(data_batch)


@setup(SAME)
def a_loop_that_draws(cfg):
    cfg.train_cfg = dict(type='DrawingLoop', max_epochs=2)


@setup(SAME)
def a_loop_that_scales_by_what_it_draws(cfg):
    by_iterations(cfg)
    cfg.train_cfg.type = 'ScalingLoop'


# --- loaders and samplers that users bring --------------------------------------------------------

def data(cfg):
    return DATASETS.build(cfg.train_dataloader.dataset)


def objects(**loaders):
    """A build from loader objects: ``name=function(cfg, workers)``."""
    def build(cfg):
        count = cfg.train_dataloader.num_workers
        settings = dict(cfg._cfg_dict)
        made = {}
        for name, make in loaders.items():
            made.setdefault(make, make(cfg, count))
            settings[name] = made[make]
        return Runner(**settings)
    return build


def entries(cfg):
    """The samples without augmentations, which would be drawn before the seed is set."""
    kinds = ('TinyLoad', 'TinyPack')
    return DATASETS.build(dict(cfg.train_dataloader.dataset,
                               pipeline=[dict(type=kind) for kind in kinds]))


def plain_loader(cfg, count, **options):
    return DataLoader(data(cfg), batch_size=2, num_workers=count, collate_fn=pseudo_collate,
                      **options)


def out_of_order(cfg, count):
    return plain_loader(cfg, count or 1, in_order=False)


@setup(REFUSED, 'in_order', variations=(), build=objects(train_dataloader=out_of_order))
def batches_in_any_order(cfg):
    pass


@setup(SAME, build=objects(train_dataloader=lambda cfg, count: plain_loader(
    cfg, count, sampler=[5, 3, 1, 0, 2, 4, 6, 7])))
def a_sampler_that_is_a_list(cfg):
    pass


@setup(SAME, build=objects(train_dataloader=lambda cfg, count: plain_loader(
    cfg, count, sampler=range(7, -1, -1))))
def a_sampler_that_is_a_range(cfg):
    pass


class DrawingSampler(Sampler):
    def __init__(self, dataset):
        self.size = len(dataset)

    def __len__(self):
        return self.size

    def __iter__(self):
        return iter(random.sample(range(self.size), self.size))


def of_drawing_sampler(cfg, count):
    dataset = data(cfg)
    return DataLoader(dataset, batch_size=2, num_workers=count, collate_fn=pseudo_collate,
                      sampler=DrawingSampler(dataset))


@setup(SAME, build=objects(train_dataloader=of_drawing_sampler))
def a_sampler_that_draws(cfg):
    pass


@setup(SAME, build=objects(train_dataloader=lambda cfg, count: DataLoader(
    list(entries(cfg)), batch_size=2, num_workers=count, shuffle=True,
    collate_fn=pseudo_collate)))
def a_dataset_that_is_a_list(cfg):
    pass


class WithSlots:
    __slots__ = ('inner', )

    def __init__(self, inner):
        self.inner = inner

    def __len__(self):
        return len(self.inner)

    def __getitem__(self, i):
        return self.inner[i]


@setup(SAME, build=objects(train_dataloader=lambda cfg, count: DataLoader(
    WithSlots(data(cfg)), batch_size=2, num_workers=count, shuffle=True,
    collate_fn=pseudo_collate)))
def a_dataset_with_slots(cfg):
    pass


@DATASETS.register_module(force=True)
class Batched(TinyData):
    """Fetches a batch in one go, and draws for it as a whole."""

    def __getitems__(self, indices):
        shift = random.random()
        return [dict(item, inputs=item['inputs'] + shift)
                for item in (self[i] for i in indices)]


@setup(SAME)
def a_dataset_with_getitems_of_its_own(cfg):
    cfg.train_dataloader.dataset.type = 'Batched'


class Ahead:
    """A loader around the loader: a thread fetches the next batch while the model trains."""

    def __init__(self, loader):
        self.loader = loader

    def __iter__(self):
        found = []

        def fetch(iterator):
            try:
                found.append(next(iterator, None))
            except Exception as error:
                found.append(error)

        iterator = iter(self.loader)
        fetch(iterator)
        while found[0] is not None:
            batch = found.pop()
            if isinstance(batch, Exception):
                raise batch
            thread = threading.Thread(target=fetch, args=(iterator, ))
            thread.start()
            yield batch
            thread.join()


class PrefetchingLoader(DataLoader):
    """Fetches ahead in a thread of the main process, as prefetchers do."""

    def __iter__(self):
        return iter(Ahead(_Inner(self)))


class _Inner:
    def __init__(self, loader):
        self.loader = loader

    def __iter__(self):
        return DataLoader.__iter__(self.loader)


def prefetching(cfg, count):
    dataset = data(cfg)
    return PrefetchingLoader(dataset, batch_size=2, num_workers=count, collate_fn=pseudo_collate,
                             sampler=DefaultSampler(dataset, shuffle=True))


@setup(REFUSED, 'thread', variations=(), build=objects(train_dataloader=prefetching))
def a_loader_that_prefetches_in_a_thread(cfg):
    pass


def with_validation(cfg):
    cfg.train_cfg.val_interval = 1
    cfg.update(val_cfg=dict(), val_evaluator=dict(type='TinyMetric'),
               test_cfg=dict(), test_evaluator=dict(type='TinyMetric'))


def for_both(cfg, count):
    return plain_loader(cfg, count)


@setup(SAME, build=objects(
    train_dataloader=of_drawing_sampler, val_dataloader=for_both, test_dataloader=for_both))
def one_loader_for_validation_and_test(cfg):
    with_validation(cfg)


def _one_dataset(cfg):
    dataset, count = data(cfg), cfg.train_dataloader.num_workers
    settings = dict(cfg._cfg_dict)
    settings['train_dataloader'] = DataLoader(
        dataset, batch_size=2, num_workers=count, collate_fn=pseudo_collate,
        sampler=DefaultSampler(dataset, shuffle=True))
    settings['val_dataloader'] = DataLoader(dataset, batch_size=4, collate_fn=pseudo_collate)
    return Runner(**settings)


@setup(SAME, build=_one_dataset)
def one_dataset_for_training_and_validation(cfg):
    cfg.train_cfg.val_interval = 1
    cfg.update(val_cfg=dict(), val_evaluator=dict(type='TinyMetric'))


def _split(cfg):
    dataset = data(cfg)
    part, _ = torch.utils.data.random_split(dataset, [6, 2])
    settings = dict(cfg._cfg_dict)
    settings['train_dataloader'] = DataLoader(
        part, batch_size=2, num_workers=cfg.train_dataloader.num_workers, shuffle=True,
        collate_fn=pseudo_collate)
    return Runner(**settings)


@setup(WARNED, 'Subset', variations=(), build=_split)
def a_random_split_before_the_seed(cfg):
    pass
