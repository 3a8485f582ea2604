"""Runs that were never trained: files as FingerprintHook and MMEngine write them."""
import copy
import hashlib
import json
import math
from pathlib import Path

NAMES = [f'{part}.{layer}.weight' for part in ('backbone.layer1', 'backbone.layer2', 'neck',
                                               'head') for layer in ('0', '1')]


def changed(content, *path, value):
    """Copy nested dicts and lists, with ``value`` at ``path``."""
    name, *rest = path
    content = copy.copy(content)
    content[name] = changed(content[name], *rest, value=value) if rest else value
    return content


def _hex(*key):
    return hashlib.sha256(repr(key).encode()).hexdigest()[:16]


def step(i, level='parameter', noise=0., since=None, field='parameters', names=NAMES):
    """A record; from iteration ``since`` on it is another one, beginning with ``field``."""
    order = ('data', 'losses', 'buffers', 'gradients', 'optimizer', 'parameters')
    late = since is not None and i >= since
    off = {kind: late and (i > since or order.index(kind) >= order.index(field)) for kind in order}
    size = noise * 3.**(i - since) if late else 0.
    loss = 2. / (i + 1) + .1 * math.sin(i)
    record = dict(
        kind='step', iteration=i, epoch=i // 10,
        batch=dict(positions=[2 * i, 2 * i + 1], data=_hex('data', i, off['data'])),
        losses={name: (part * (loss + (size if off['losses'] else 0.))).hex()
                for name, part in (('loss', 1.), ('loss_cls', .6), ('loss_bbox', .4))},
        lr={'base': [(.01).hex()]},
        **{kind: _hex(kind, i, off[kind])
           for kind in ('gradients', 'parameters', 'buffers', 'optimizer')})
    if level == 'parameter':
        changed = {name: off['parameters'] and (i > since or name.startswith('head'))
                   for name in names}
        record['by_name'] = dict(
            gradients={name: _hex(name, i, off['gradients']) for name in names},
            parameters={name: _hex(name, i, changed[name]) for name in names},
            buffers={}, optimizer={name: _hex(name, 'o', i, off['optimizer']) for name in names})
        record['norms'] = {name: (1. + .1 * n + .01 * i + (size * (n + 1) if changed[name] else 0.)
                                  ).hex() for n, name in enumerate(names)}
    return record


def write_run(folder, count=20, rank=0, world=1, level='parameter', end=True, manifest=None,
              facts=None, vals=True, **kwargs):
    """Write a run of ``count`` iterations to ``folder``; returns the folder as text."""
    records = Path(folder, 'mmrepro')
    records.mkdir(parents=True, exist_ok=True)
    lines = [dict(kind='start', format=1, level=level, interval=1, rank=rank, world_size=world,
                  scheme=1, iteration=0, manifest='manifest.json')]
    for i in range(count):
        lines.append(step(i, level, **kwargs))
        if vals and (i + 1) % 10 == 0:
            lines.append(dict(kind='val', iteration=i + 1, epoch=i // 10,
                              metrics={'coco/bbox_mAP': (.01 * i).hex()}))
    lines += [dict(kind='end', iteration=count)] if end else []
    (records / f'fingerprints.rank{rank}.jsonl').write_text(
        ''.join(json.dumps(line) + '\n' for line in lines))
    if rank == 0:
        (records / 'manifest.json').write_text(json.dumps(dict(
            kind='manifest', format=1, config=dict(text="model = dict(type='X')\n"),
            facts={'randomness.seed': 1, **(facts or {})}, **(manifest or {}))))
    return str(folder)


def write_log(folder, count=20, stamp='20260101_000000', first=0, off=None, config=None, val=.3):
    """Write a stock run's scalars.json and config; from iteration ``off`` on its losses differ."""
    records = Path(folder, stamp, 'vis_data')
    records.mkdir(parents=True, exist_ok=True)
    with open(records / 'scalars.json', 'w') as file:
        for i in range(first, count):
            loss = 1 / (i + 1) + (1e-4 * 1.5**(i - off) if off is not None and i >= off else 0.)
            row = dict(lr=.02, data_time=.1 * (off or 1), loss=loss, loss_cls=loss / 2,
                       grad_norm=1., time=.5, epoch=1, iter=i + 1, memory=0, step=i + 1)
            file.write(json.dumps(row) + '\n')
        file.write(json.dumps({'coco/bbox_mAP': val, 'data_time': .1, 'time': .2, 'step': 1})
                   + '\n')
    (records / 'config.py').write_text(
        config or "model = dict(type='RetinaNet')\nrandomness = dict(seed=1)\n")
    return str(folder)
