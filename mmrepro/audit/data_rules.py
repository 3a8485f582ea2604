"""Checks of datasets, transforms and samplers. The table of rules is in ``rules.py``."""
from __future__ import annotations

from ..checkpoint.adapters import ADAPTERS
from ..data.loader import without_positions
from ..data.sampling_orders import STOCK_FAULTS, sampling_order_of, strided_stock
from ..patches import CAUSES
from .findings import MAY, Found, Hits
from .subject import Subject, is_stock

LOADERS = ('train_dataloader', 'val_dataloader', 'test_dataloader')


# streams of samples and steps take care of these; no table of replacements has them
_BY_STREAMS: dict[str, tuple[str, str]] = {
    'ScoreHLRSampler': (
        'C15', "positives from the accelerator's generator, negatives from the CPU's"),
    **dict.fromkeys(('YOLOXModeSwitchHook', 'PipelineSwitchHook'), (
        'B14', 'restarts the workers at the switch, and again at a resume')),
}


def known_parts(s: Subject) -> Hits:
    """Types that break the contract, where mmrepro does not replace or seed them."""
    if s.keyed:
        return
    # type in a config, id in causes.md, why, 'key=value' that has to be in the dict
    faults = [
        *((name, *fault, '') for name, fault in (*_BY_STREAMS.items(), *STOCK_FAULTS.items())),
        *((name, cause.id, cause.why, cause.condition) for cause in CAUSES for name in cause.types),
        *((name, 'B11', f'lost at a resume: {adapter.why}', '')
          for name, adapter in ADAPTERS.items())]
    for part in s.training:
        for name, cause, why, condition in faults:
            key, _, value = condition.partition('=')
            if name == part.name and (not key or str(part.node.get(key)) == value):
                yield Found(part.key, f'{part.name}: {why} ({cause})')


def stock_workers(s: Subject) -> Hits:
    loader = s.cfg.get('train_dataloader') or {}
    if s.keyed or not isinstance(loader, dict):
        return
    workers = loader.get('num_workers', 0)
    if workers:
        yield Found('train_dataloader.num_workers',
                    f'{workers}: the augmentation of a sample depends on this number')
    if workers and not loader.get('persistent_workers'):
        yield Found('train_dataloader.persistent_workers',
                    'False: every epoch draws the same random numbers', MAY)


def stock_validation(s: Subject) -> Hits:
    if not s.keyed and s.cfg.get('val_dataloader') and s.cfg.get('train_dataloader'):
        interval = (s.cfg.get('train_cfg') or {}).get('val_interval', 1)
        yield Found('train_cfg.val_interval',
                    f'{interval}: each validation moves the generators of training')


def without_position(s: Subject) -> Hits:
    """Loaders that mmrepro's runner refuses."""
    if not s.keyed:
        return
    for key in LOADERS:
        loader = s.cfg.get(key)
        if isinstance(loader, dict) and loader.get('batch_size', 1) is None \
                and not loader.get('batch_sampler'):
            yield Found(f'{key}.batch_size', without_positions(object, batched=False))
    for part in s.parts_in(*LOADERS):
        cls = s.class_of(part)
        refusal = without_positions(cls) if cls is not None else ''
        if refusal:
            yield Found(part.key, refusal)


def own_sampler(s: Subject) -> Hits:
    if not s.keyed:
        return
    for part in s.parts_in('train_dataloader'):
        cls = s.class_of(part)
        if part.key == 'train_dataloader.sampler' and cls is not None \
                and not is_stock(cls.__module__) \
                and sampling_order_of(cls) is strided_stock:
            yield Found(part.key, f'{part.name}: an order that mmrepro does not know')


def ranks_differ(s: Subject) -> Hits:
    for part in s.parts_in('train_dataloader'):
        if part.name == 'MultiDataAspectRatioBatchSampler' and s.world_size > 1:
            yield Found(part.key, f'{part.name}, {s.world_size} ranks')
