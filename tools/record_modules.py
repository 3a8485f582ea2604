"""Run one batch through the model of a config; keep samples of what modules get and give.

`mmrepro compare --trace` runs this file, also with interpreters that have no mmrepro: it needs
MMEngine and what the config uses. By hand, for an environment on another machine:

    python record_modules.py '{"config": "a.py", "out": "a.pt"}'
    python record_modules.py '{"config": "b.py", "out": "b.pt", "given": "a.pt"}'

Keys: `config`; `out`, the file to write; `weights`, a file with a state dict (without it: initial
weights); `given`, the file of another recording, whose weights and batch are taken; `imports`.
"""
import importlib
import json
import random
import sys

import numpy
import torch
from mmengine.config import Config
from mmengine.registry import MODELS, init_default_scope
from mmengine.runner import Runner

# of what versions have in other forms: hooks see keywords, and files may hold objects
NEW = int(torch.__version__.split('.')[0]) >= 2
KEYWORDS, TRUSTED = (dict(with_kwargs=True), dict(weights_only=False)) if NEW else ({}, {})
MOST = 4096  # elements of a tensor that are kept
SEED = 0


def named_tensors(value, name=''):
    """Yield path and tensor in nested data; the fields of data elements are sorted by name."""
    if isinstance(getattr(value, 'tensor', None), torch.Tensor):  # boxes of MMDetection
        value = value.tensor
    if isinstance(value, torch.Tensor):
        yield name, value
        return
    items = ()
    if hasattr(value, 'all_items'):
        items = sorted(value.all_items())
    elif isinstance(value, dict):
        items = value.items()
    elif isinstance(value, (list, tuple)):
        items = enumerate(value)
    for key, item in items:
        yield from named_tensors(item, f'{name}.{key}' if name else str(key))


def sampled(value):
    """Return shape, norm and up to MOST evenly spaced elements of each tensor in nested data."""
    return [(tuple(tensor.shape), float(flat.norm()), flat[::-(-flat.numel() // MOST) or 1].clone())
            for _, tensor in named_tensors(value) for flat in [tensor.detach().cpu().reshape(-1).to(
                torch.complex128 if tensor.is_complex() else torch.float64)]]


def watch(model, events, phase):
    """Append (phase, module, number of the call, 'in' or 'out'), class and samples to `events`."""
    calls, handles = {}, []

    def add(name, module, end, value):
        if end == 'in':
            calls[name] = calls.get(name, -1) + 1
        events.append(((phase[0], name, calls[name], end), type(module).__name__, sampled(value)))

    for name, module in model.named_modules():
        handles += [
            module.register_forward_pre_hook(
                lambda module, args, kwargs={}, name=name: add(name, module, 'in', (args, kwargs)),
                **KEYWORDS),
            module.register_forward_hook(
                lambda module, args, output, name=name: add(name, module, 'out', output))]
    return handles


def seed():
    for seeded in (random.seed, numpy.random.seed, torch.manual_seed):
        seeded(SEED)


def built(cfg):
    seed()
    model = dict(cfg.model)
    if cfg.get('data_preprocessor'):
        model.setdefault('data_preprocessor', cfg.data_preprocessor)
    return MODELS.build(model)


def first_batch(cfg):
    seed()
    loader = dict(cfg.train_dataloader, num_workers=0, persistent_workers=False)
    loader.pop('prefetch_factor', None)
    return next(iter(Runner.build_dataloader(loader, seed=SEED)))


def load(model, weights):
    """Load what fits of a state dict, and return lines on what does not."""
    own = model.state_dict()
    fits = {name: value for name, value in weights.items()
            if name in own and own[name].shape == value.shape}
    model.load_state_dict(fits, strict=False)
    return [f'{name}: {"of another shape" if name in own and name in weights else lacking}'
            for names, lacking in ((weights, 'not in this model'), (own, 'no weights for it'))
            for name in names if name not in fits and (names is weights or name not in weights)]


def main(job):
    cfg = Config.fromfile(job['config'], import_custom_modules=False)
    names = (cfg.get('custom_imports') or {}).get('imports') or []
    for name in [*job.get('imports', ()), *([names] if isinstance(names, str) else names)]:
        if name.split('.')[0] != 'mmrepro' or name in job.get('imports', ()):
            importlib.import_module(name)
    init_default_scope(cfg.get('default_scope') or 'mmengine')
    model = built(cfg)
    if job.get('given'):
        # NumPy 1 reads what NumPy 2 has pickled, and vice versa
        core = numpy.core if int(numpy.__version__[0]) < 2 else numpy._core
        for package in ('core', '_core'):
            sys.modules.setdefault(f'numpy.{package}', core)
            sys.modules.setdefault(f'numpy.{package}.multiarray', core.multiarray)
        given = torch.load(job['given'] + '.batch', **TRUSTED)
        weights, batch = given['weights'], given['batch']
        notes = load(model, weights)
    else:
        batch = first_batch(cfg)
        if job.get('weights'):
            notes = load(model, torch.load(job['weights'], **TRUSTED))
        else:
            model.init_weights()
            notes = []
        torch.save(dict(weights=model.state_dict(), batch=batch), job['out'] + '.batch')
    events, phase = [], ['predict']
    handles = watch(model, events, phase)
    with torch.no_grad():
        seed()
        model.eval()
        found = model._run_forward(model.data_preprocessor(batch, False), mode='predict')
        predictions = {
            f'image {number}: {name}': tensor.detach().cpu().clone()
            for number, sample in enumerate(found if isinstance(found, (list, tuple)) else [found])
            for name, tensor in named_tensors(getattr(sample, 'pred_instances', sample))}
        seed()
        phase[0] = 'loss'
        model.train()
        losses = model._run_forward(model.data_preprocessor(batch, True), mode='loss')
    for handle in handles:
        handle.remove()
    losses = {name: float(sum(tensor.double().sum() for _, tensor in named_tensors(value)))
              for name, value in losses.items()}
    versions = {name: str(sys.modules[name].__version__)
                for name in ('torch', 'mmengine', 'mmcv', 'mmdet') if name in sys.modules}
    torch.save(dict(events=events, notes=notes, predictions=predictions, losses=losses,
                    versions=versions), job['out'])


if __name__ == '__main__':
    main(json.loads(sys.argv[1]))
