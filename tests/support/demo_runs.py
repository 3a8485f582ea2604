"""The demo configs, made small enough for tests, changes to them, and what their logs say."""
import copy
import json

import torch
from children import Child
from narrowing import WIDTHS
from unformatted import unformatted

MODELS = ('faster-rcnn_r50_fpn', 'yolox_s', 'rtmdet_tiny', 'deformable-detr_r50')
IMAGES = dict(zip(MODELS, (6, 12, 12, 6)))  # three iterations an epoch


def small(model, data_root):
    """Return the demo config of a model, with smaller images and fewer of them."""
    from mmrepro.demo.dataset import demo_config
    cfg = unformatted(demo_config(model, data_root))
    _replace(cfg._cfg_dict)
    dataset = cfg.train_dataloader.dataset
    for leaf in dataset.get('datasets', [dataset.get('dataset', dataset)]):
        leaf['indices'] = IMAGES.get(model, 6)
    cfg.val_dataloader.dataset['indices'] = 2
    cfg.default_hooks.checkpoint = None
    cfg.log_level = 'ERROR'
    return cfg


# widths and heights of the demo configs -> of the tests
SMALLER = {
    (256, 192): (160, 120), (192, 192): (128, 128), (384, 384): (256, 256),
    (128, 96): (96, 72),
    # Deformable DETR's choices
    (160, 256): (96, 160), (192, 256): (112, 160), (224, 256): (128, 160), (200, 400): (112, 240),
    (240, 400): (144, 240), (128, 192): (80, 120),
}


def _replace(node):
    items = node.items() if isinstance(node, dict) else enumerate(node)
    for key, value in list(items):
        if isinstance(value, tuple) and value in SMALLER:
            node[key] = SMALLER[value]
        elif isinstance(value, (dict, list)):
            _replace(value)


def workers(count, persistent=False, prefetch=None, start=None):
    def change(cfg):
        cfg.train_dataloader.merge(dict(
            num_workers=count, persistent_workers=persistent, prefetch_factor=prefetch))
        if start:
            cfg.train_dataloader.multiprocessing_context = start
    return change


def changed(cfg, change):
    cfg = copy.deepcopy(cfg)
    change(cfg)
    return cfg


def narrow(cfg):
    """Keep a quarter of the channels, of a transformer those of its backbone; all layers stay."""
    if cfg.model.backbone.type == 'CSPDarknet':
        cfg.model.backbone.widen_factor = 0.125
        cfg.model.neck.update(in_channels=[32, 64, 128], out_channels=32)
        cfg.model.bbox_head.update(in_channels=32, feat_channels=32)
    elif cfg.model.backbone.type == 'ResNet':
        WIDTHS['quarter backbone' if 'encoder' in cfg.model else 'quarter'](cfg.model)


def log_lines(work_dir):
    """Logged scalars by step, without times."""
    steps = {}
    for path in sorted(work_dir.glob('*/vis_data/*.json')):
        if path.name == 'config.json':
            continue
        for line in path.read_text().splitlines():
            record = json.loads(line)
            if 'loss' in record:
                steps[record['step']] = {key: value for key, value in record.items()
                                         if 'time' not in key and key != 'memory'}
    return steps


def shallow_detr(cfg):
    cfg.model.backbone.depth, cfg.model.neck.in_channels = 18, [128, 256, 512]
    for part in (cfg.model.encoder, cfg.model.decoder):
        part.num_layers = 3


def initialised(name, data_root, folder):
    """Return the paths of a small demo config and of weights that are not trained."""
    paths = str(folder / f'{name}.py'), str(folder / f'{name}.pth')

    def job():
        from mmengine.logging import HistoryBuffer
        from mmengine.registry import MODELS, init_default_scope

        from mmrepro import set_random_seed
        init_default_scope('mmdet')
        cfg = small(name, data_root)
        narrow(cfg)
        test = cfg.model.get('test_cfg') or {}
        for one in (test, *test.values()):
            if isinstance(one, dict) and 'score_thr' in one:
                one.score_thr = 0.
        cfg.dump(paths[0])
        set_random_seed(0)
        model = MODELS.build(cfg.model)
        model.init_weights()
        torch.save(dict(meta=dict(dataset_meta=dict(classes=tuple('abcdef'))),
                        message_hub=dict(log_scalars=dict(loss=HistoryBuffer([1.], [1]))),
                        state_dict=model.state_dict()), paths[1])  # as a training writes it

    Child(job).result()
    return paths
