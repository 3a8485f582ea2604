"""Files that stay open or are read back, quantization, sizes beside indices, several loaders."""
from __future__ import annotations

import copy
import io
import json
import os
import shutil
import tarfile
from pathlib import Path

import numpy as np
import torch
from faults.tiny import Tiny, TinyData
from mmcv.transforms import BaseTransform
from mmengine.hooks import CheckpointHook, Hook
from mmengine.logging import MessageHub
from mmengine.optim import OptimWrapper, OptimWrapperDict
from mmengine.registry import HOOKS, LOOPS, OPTIM_WRAPPER_CONSTRUCTORS, OPTIMIZERS
from mmengine.runner import ValLoop
from torch import nn
from torch.ao import quantization
from torch.utils.data import BatchSampler

from .setup import TRAINED, batch_sampler, dataset, hook, model, setup, transform, use_all
from .steps import Extra

OPEN = 'files that are opened before there are workers'
WORK_DIR = 'files in the work directory'
PROGRESS = 'progress that transforms read'
PARTS = 'quantization, sparse gradients, closures'
LOADERS = 'sizes beside indices, several loaders'
METRICS = 'layers that are frozen by metrics'
RECORD = 192 * 4  # bytes


def images():
    grid = np.arange(192, dtype=np.float32).reshape(3, 8, 8)
    return [np.sin(grid * (1 + number)) for number in range(16)]


def added(sample, record):
    image = torch.frombuffer(bytearray(record), dtype=torch.float32).view(3, 8, 8)
    return dict(sample, inputs=sample['inputs'] + image)


# ------------------------------------------------------------------------------------ open files


@dataset
class FileOfRecords(TinyData):
    def __init__(self, path, **kwargs):
        self.file = open(path, 'rb')  # noqa: SIM115
        super().__init__(**kwargs)

    def prepare_data(self, idx):
        self.file.seek(idx * RECORD)
        return added(super().prepare_data(idx), self.file.read(RECORD))


@setup(OPEN)
def file_opened_at_the_start(cfg):
    path = Path(cfg.first).with_name('records')
    path.write_bytes(b''.join(image.tobytes() for image in images()))
    use_all(cfg, FileOfRecords)
    cfg.train_dataloader.dataset.path = str(path)


@dataset
class ArchiveOfRecords(TinyData):
    def __init__(self, path, **kwargs):
        self.archive = tarfile.open(path)  # noqa: SIM115
        super().__init__(**kwargs)

    def prepare_data(self, idx):
        record = self.archive.extractfile(str(idx)).read()
        return added(super().prepare_data(idx), record)


@setup(OPEN)
def archive_opened_at_the_start(cfg):
    path = Path(cfg.first).with_name('records.tar')
    with tarfile.open(path, 'w') as archive:
        for number, image in enumerate(images()):
            entry = tarfile.TarInfo(str(number))
            entry.size = RECORD
            archive.addfile(entry, io.BytesIO(image.tobytes()))
    use_all(cfg, ArchiveOfRecords)
    cfg.train_dataloader.dataset.path = str(path)


# -------------------------------------------------------------------------------- work directory


@dataset
class PseudoLabels(TinyData):
    """Labels that the model has predicted after the last epoch."""

    def prepare_data(self, idx):
        hub = MessageHub.get_current_instance()
        path = Path(hub.get_info('labels'), f'labels_{hub.get_info("epoch")}.json')
        sample = super().prepare_data(idx)
        return dict(sample, label=torch.tensor(json.loads(path.read_text())[idx])) if (
            path.exists()) else sample


@hook
class WritesPseudoLabels(Hook):
    def before_train(self, runner):
        runner.message_hub.update_info('labels', runner.work_dir)

    def after_train_epoch(self, runner):
        inputs = torch.from_numpy(np.stack(images()))
        with torch.no_grad():
            scores = runner.model.head.fc(runner.model.backbone[0](inputs).mean((2, 3)))
        path = Path(runner.work_dir, f'labels_{runner.epoch + 1}.json')
        path.write_text(json.dumps(scores.argmax(1).tolist()))


def in_place(cfg):
    """Resume where the files of the run are."""
    os.makedirs(cfg.work_dir, exist_ok=True)
    for path in Path(cfg.first).glob('labels_*'):
        shutil.copy(path, cfg.work_dir)


@setup(WORK_DIR, variations=('workers', 'resumed at 3', 'resumed at 8', 'resumed at 12'),
       later=lambda cfg: in_place(cfg) if cfg.get('resume') else None)
def pseudo_labels(cfg):
    use_all(cfg, PseudoLabels, WritesPseudoLabels)


@HOOKS.register_module(force=True)
class KeepsTheBestTwo(CheckpointHook):
    """Writes a file for each validation, and removes it when two others are better."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.scores = []

    def after_val_epoch(self, runner, metrics=None):
        super().after_val_epoch(runner, metrics)
        name = f'top_{runner.iter}.pth'
        runner.save_checkpoint(runner.work_dir, name, by_epoch=False, meta=dict(
            epoch=runner.epoch, iter=runner.iter))
        self.scores = sorted([*self.scores, (metrics['largest'], name)], reverse=True)
        for _, worse in self.scores[2:]:
            os.remove(os.path.join(runner.work_dir, worse))
        del self.scores[2:]


@setup(WORK_DIR)
def keeps_the_best_two(cfg):
    cfg.default_hooks.checkpoint.type = 'KeepsTheBestTwo'


# -------------------------------------------------------------------------------------- progress


@setup(PROGRESS)
@transform
class StrengthOfTheIteration(BaseTransform):
    def transform(self, results):
        done = MessageHub.get_current_instance().get_info('iter') or 0
        return dict(results, img=results['img'] * np.float32(1 + done / 24))


@transform
class StrengthOfTheEpoch(BaseTransform):
    def transform(self, results):
        epoch = MessageHub.get_current_instance().get_info('epoch') or 0
        return dict(results, img=results['img'] * np.float32(1 + epoch / 3))


@setup(PROGRESS)
def strength_of_the_epoch(cfg):
    use_all(cfg, StrengthOfTheEpoch)


@setup(PROGRESS)
def strength_of_the_epoch_in_workers_that_stay(cfg):
    use_all(cfg, StrengthOfTheEpoch)
    cfg.train_dataloader.update(num_workers=2, persistent_workers=True)


# ----------------------------------------------------------------------------------------- parts


@hook
class PreparesQuantization(Hook):
    def before_run(self, runner):
        backbone = runner.model.backbone.train()
        backbone.qconfig = quantization.get_default_qat_qconfig('fbgemm')
        quantization.prepare_qat(backbone, inplace=True)

    def before_train_epoch(self, runner):
        if runner.epoch >= 2:
            runner.model.apply(quantization.disable_observer)


@setup(PARTS, variations=(*TRAINED, 'not validated'))
def quantization_observes_predictions(cfg):
    use_all(cfg, PreparesQuantization)


@hook
class ObservesTrainingOnly(PreparesQuantization):
    def before_val_epoch(self, runner):
        runner.model.apply(quantization.disable_observer)

    def after_val_epoch(self, runner, metrics=None):
        if runner.epoch <= 2:  # two are done, and the third has not begun
            runner.model.apply(quantization.enable_observer)


@setup(PARTS)
def quantization_aware(cfg):
    use_all(cfg, ObservesTrainingOnly)


@OPTIMIZERS.register_module(force=True)
class ScheduleFree(torch.optim.Optimizer):
    """Predicts with averages, and goes back to what is trained afterwards."""

    def __init__(self, params, lr, beta=.9):
        super().__init__(params, dict(lr=lr, beta=beta, steps=0))

    @torch.no_grad()
    def blend(self, weight):
        for group in self.param_groups:
            for value in group['params']:
                if value in self.state:
                    value.lerp_(self.state[value]['base'], weight(group['beta']))

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            group['steps'] += 1
            share = 1 / group['steps']
            for value in group['params']:
                base = self.state[value].setdefault('base', value.clone())
                value.lerp_(base, share)
                value.add_(value.grad, alpha=group['lr'] * (group['beta'] * (1 - share) - 1))
                base.sub_(value.grad, alpha=group['lr'])


@hook
class PredictsWithAverages(Hook):
    def before_val_epoch(self, runner):
        runner.optim_wrapper.optimizer.blend(lambda beta: 1 - 1 / beta)

    def after_val_epoch(self, runner, metrics=None):
        runner.optim_wrapper.optimizer.blend(lambda beta: 1 - beta)


@setup(PARTS, variations=(*TRAINED, 'not validated'))
def schedule_free(cfg):
    use_all(cfg, PredictsWithAverages)
    cfg.optim_wrapper.optimizer = dict(type='ScheduleFree', lr=.1)


@model
class TableOfClasses(Extra):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.table = nn.Embedding(3, 4, sparse=True)

    def extra(self, inputs, label, loss):
        return (self.table(label) - self.backbone(inputs).mean((2, 3)).detach()).pow(2).mean()

    def train_step(self, data, optim_wrapper):
        data = self.data_preprocessor(data, True)
        loss, logged = self.parse_losses(self(**data, mode='loss'))
        optim_wrapper.zero_grad()
        loss.backward()
        optim_wrapper.step()
        return logged


@OPTIM_WRAPPER_CONSTRUCTORS.register_module(force=True)
class SparseAndDense:
    def __init__(self, optim_wrapper_cfg, paramwise_cfg=None):
        pass

    def __call__(self, model):
        dense = [value for name, value in model.named_parameters() if name != 'table.weight']
        wrappers = OptimWrapperDict(
            dense=OptimWrapper(torch.optim.Adagrad(dense, lr=.01)),
            sparse=OptimWrapper(torch.optim.SparseAdam([model.table.weight], lr=.01)))
        for name in ('zero_grad', 'step'):
            setattr(wrappers, name, lambda name=name: [
                getattr(one, name)() for one in wrappers.values()])
        return wrappers


@setup(PARTS)
def sparse_gradients(cfg):
    use_all(cfg, TableOfClasses)
    cfg.optim_wrapper = dict(constructor='SparseAndDense')
    cfg.param_scheduler = None


@model
class StepsByAClosure(Tiny):
    def train_step(self, data, optim_wrapper):
        data, logged = self.data_preprocessor(data, True), {}

        def closure():
            optim_wrapper.zero_grad()
            loss, log = self.parse_losses(self(**data, mode='loss'))
            loss.backward()
            logged.update(log)
            return loss

        optim_wrapper.optimizer.step(closure)
        return logged


@setup(PARTS)
def closure_of_lbfgs(cfg):
    use_all(cfg, StepsByAClosure)
    cfg.optim_wrapper.optimizer = dict(type='LBFGS', lr=.1, max_iter=3)
    cfg.param_scheduler = None


# --------------------------------------------------------------------------------------- loaders


@batch_sampler
class SizesOfBatches(BatchSampler):
    """As YOLOX: each index comes with the size of its batch."""

    def __init__(self, sampler, batch_size=2, drop_last=False):
        super().__init__(sampler, batch_size, drop_last)

    def __iter__(self):
        for number, batch in enumerate(super().__iter__()):
            yield [(6 + number % 3, index) for index in batch]


@dataset
class Cropped(TinyData):
    def __getitem__(self, idx):
        size, idx = idx if isinstance(idx, tuple) else (8, idx)
        sample = super().__getitem__(idx)
        return dict(sample, inputs=sample['inputs'][:, :size, :size])


@setup(LOADERS)
def sizes_beside_indices(cfg):
    use_all(cfg, SizesOfBatches, Cropped)


@LOOPS.register_module(force=True)
class ValidatesOnTwo(ValLoop):
    def __init__(self, runner, dataloader, evaluator, fp16=False):
        super().__init__(runner, dataloader[0], evaluator[0], fp16)
        self.second = ValLoop(runner, dataloader[1], evaluator[1], fp16)

    def run(self):
        self.runner.model.eval()
        for number, batch in enumerate(self.second.dataloader):
            self.second.run_iter(number, batch)
        self.second.evaluator.evaluate(len(self.second.dataloader.dataset))
        return super().run()


@setup(LOADERS, variations=('again', 'resumed at 3', 'resumed at 8', 'resumed at 12'))
def validates_on_two(cfg):
    cfg.val_cfg = dict(type='ValidatesOnTwo')
    for name in ('val_dataloader', 'val_evaluator'):
        cfg[name] = [cfg[name], copy.deepcopy(cfg[name])]


# --------------------------------------------------------------------------------------- metrics


@setup(METRICS, variations=(*TRAINED, 'not validated'))
@hook
class FreezesByTheScoreAndKeepsIt(Hook):
    frozen = False

    def before_train(self, runner):
        if self.frozen:
            runner.model.backbone[0].requires_grad_(False)

    def after_val_epoch(self, runner, metrics=None):
        if metrics['largest'] > 0:
            self.frozen = True
            runner.model.backbone[0].requires_grad_(False)

    def before_save_checkpoint(self, runner, checkpoint):
        checkpoint['frozen'] = self.frozen

    def after_load_checkpoint(self, runner, checkpoint):
        self.frozen = checkpoint['frozen']


@setup(METRICS)
@hook
class FreezesBeforeTheNextEpoch(Hook):
    """As the error for the other one says."""

    def after_val_epoch(self, runner, metrics=None):
        runner.message_hub.update_info('largest', metrics['largest'])

    def before_train_epoch(self, runner):
        largest = runner.message_hub.get_info('largest')
        runner.model.backbone[0].requires_grad_(largest is None or largest <= .5)
