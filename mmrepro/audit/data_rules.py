"""Checks of datasets, transforms and samplers. The table of rules is in ``rules.py``."""
from __future__ import annotations

from typing import Dict, List, NamedTuple

from ..checkpoint.adapters import ADAPTERS
from ..data.loader import without_positions
from ..data.sampling_orders import STOCK_FAULTS, sampling_order_of, strided_stock
from ..patches import CAUSES
from .findings import MAY, Found, Hits
from .subject import STOCK, Subject

LOADERS = ('train_dataloader', 'val_dataloader', 'test_dataloader')


class StockFault(NamedTuple):
    """What a type of MMDetection does that differs between runs, without mmrepro.

    Attributes:
        cause: id in docs/explanation/causes.md.
        why: in one line.
        condition: ``key=value`` that has to be in the dict, or ''.
    """
    cause: str
    why: str
    condition: str = ''

    def applies(self, node: dict) -> bool:
        key, _, value = self.condition.partition('=')
        return not key or node.get(key) == value


# streams of samples and steps take care of these; no table of replacements has them
_BY_STREAMS: Dict[str, StockFault] = {
    'ScoreHLRSampler': StockFault(
        'C15', "positives from the accelerator's generator, negatives from the CPU's"),
    **dict.fromkeys(('YOLOXModeSwitchHook', 'PipelineSwitchHook'), StockFault(
        'B14', 'restarts the workers at the switch, and again at a resume')),
}


def stock_faults() -> Dict[str, List[StockFault]]:
    """Type in a config -> its faults, from the tables that mmrepro answers them with."""
    faults: Dict[str, List[StockFault]] = {name: [one] for name, one in _BY_STREAMS.items()}
    for cause in CAUSES:
        for name in cause.types:
            faults.setdefault(name, []).append(StockFault(cause.id, cause.why, cause.condition))
    for name, fault in STOCK_FAULTS.items():
        faults.setdefault(name, []).append(StockFault(*fault))
    for name, adapter in ADAPTERS.items():
        faults.setdefault(name, []).append(StockFault('B11', f'lost at a resume: {adapter.why}'))
    return faults


def known_parts(s: Subject) -> Hits:
    """Types that break the contract, where mmrepro does not replace or seed them."""
    if s.keyed:
        return
    faults = stock_faults()
    for part in s.training:
        for fault in faults.get(part.name, ()):
            if fault.applies(part.node):
                yield Found(part.key, f'{part.name}: {fault.why} ({fault.cause})')


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
                and cls.__module__.partition('.')[0] not in STOCK \
                and sampling_order_of(cls) is strided_stock:
            yield Found(part.key, f'{part.name}: an order that mmrepro does not know')


def ranks_differ(s: Subject) -> Hits:
    for part in s.parts_in('train_dataloader'):
        if part.name == 'MultiDataAspectRatioBatchSampler' and (s.world_size or 1) > 1:
            yield Found(part.key, f'{part.name}, {s.world_size} ranks')
