"""Trainings of one layer on eight points: a detector takes seconds, these take milliseconds."""
import torch
from mmengine.evaluator import BaseMetric
from mmengine.hooks import Hook
from mmengine.model import BaseAveragedModel, BaseModel
from mmengine.optim import OptimWrapper, OptimWrapperDict
from mmengine.registry import DATASETS, METRICS, MODELS, OPTIM_WRAPPER_CONSTRUCTORS
from mmengine.runner import Runner
from unformatted import Unformatted


@MODELS.register_module(force=True)
class NoisyLine(BaseModel):
    """One weight, a target, and noise from the step's stream."""

    def __init__(self):
        super().__init__()
        self.line = torch.nn.Linear(2, 1)

    def forward(self, x, mode='tensor'):
        loss = (self.line(torch.stack(x).float()) + torch.rand(1)).square().mean()
        return dict(loss=loss) if mode == 'loss' else [loss]


@METRICS.register_module(force=True)
class DumpNothing(BaseMetric):
    def process(self, data_batch, data_samples):
        self.results.append(torch.rand(1))

    def compute_metrics(self, results):
        return {}


@DATASETS.register_module(force=True)
class Points(torch.utils.data.Dataset):
    metainfo, size, noise = {}, 8, 1.

    def __init__(self, size=8, noise=1.):
        self.size, self.noise = size, noise

    def __len__(self):
        return self.size

    def __getitem__(self, i):
        return dict(x=torch.tensor([i, 1.]) + self.noise * torch.rand(2))


@MODELS.register_module(force=True)
class RampedAverage(BaseAveragedModel):
    """Its momentum falls with a counter that is in no state dict."""
    updates = 0

    def avg_func(self, averaged_param, source_param, steps):
        averaged_param.lerp_(source_param, 1 / (2 + self.updates))

    def update_parameters(self, model):
        super().update_parameters(model)
        self.updates += 1


def average_of(runner):
    return next(hook.ema_model for hook in runner.hooks if hasattr(hook, 'ema_model'))


@OPTIM_WRAPPER_CONSTRUCTORS.register_module(force=True)
class OnePerPart:
    """An optimizer for each of the two parts of a model."""

    def __init__(self, optim_wrapper_cfg, paramwise_cfg=None):
        self.counts = optim_wrapper_cfg.get('accumulative_counts', 1)

    def __call__(self, model):
        return OptimWrapperDict(
            first=OptimWrapper(torch.optim.AdamW(model.first.parameters(), lr=0.01),
                               accumulative_counts=self.counts),
            second=OptimWrapper(torch.optim.SGD(model.second.parameters(), lr=0.1, momentum=0.9)))


def config(work_dir, **kwargs):
    return Unformatted(dict(
        model=dict(type='NoisyLine'), work_dir=str(work_dir), experiment_name=work_dir.name,
        train_dataloader=dict(
            batch_size=2, num_workers=0, dataset=dict(type='Points'),
            sampler=dict(type='DefaultSampler', shuffle=True)),
        train_cfg=dict(by_epoch=True, max_epochs=2),
        optim_wrapper=dict(optimizer=dict(type='SGD', lr=0.1)),
        default_hooks=dict(checkpoint=dict(type='CheckpointHook', interval=1)),
        **{**dict(randomness=dict(seed=3, deterministic=True), log_level='WARNING'), **kwargs}))


def validating(cfg, metric='DumpNothing', phases=('val', ), batch_size=2):
    """Let a run validate, or test, on the points in their order."""
    for phase in phases:
        cfg[f'{phase}_cfg'], cfg[f'{phase}_evaluator'] = dict(), dict(type=metric)
        cfg[f'{phase}_dataloader'] = dict(
            batch_size=batch_size, num_workers=0, dataset=dict(type='Points'),
            sampler=dict(type='DefaultSampler', shuffle=False))
    return cfg


def small_run(work_dir, **changes):
    cfg = config(work_dir)
    cfg.default_hooks.checkpoint = dict(
        type='CheckpointHook', interval=1, by_epoch=False, max_keep_ckpts=-1)
    cfg.train_cfg = changes.pop('train_cfg', cfg.train_cfg)
    cfg.merge_from_dict(changes)
    return cfg


def continued(folder, point, **changes):
    return small_run(folder / f'from_{point}', resume=True,
                     load_from=str(folder / f'iter_{point}.pth'), **changes)


def hook_with(**events):
    """Return a hook that calls these functions at events of a run."""
    hook = Hook()
    vars(hook).update(events)
    return hook


def warnings_of(runner):
    """Train; return the texts of the warnings."""
    said = []
    runner.logger.warning = lambda text, *rest: said.append(text)
    runner.train()
    return said


def weights_of(runner):
    return {name: value.numpy().tobytes() for name, value in runner.model.state_dict().items()}


def trained_runner(cfg, *hooks):
    runner = Runner.from_cfg(cfg)
    for hook in hooks:
        runner.register_hook(hook)
    runner.train()
    return runner


def finish(cfg, *hooks):
    """Train; return the bytes of the weights by name."""
    return weights_of(trained_runner(cfg, *hooks))
