"""The demo configs, made small enough for tests, and changes to them."""
import copy

MODELS = ('faster-rcnn_r50_fpn', 'yolox_s', 'rtmdet_tiny', 'deformable-detr_r50')
IMAGES = dict(zip(MODELS, (6, 12, 12, 6)))  # three iterations an epoch


def small(model, data_root):
    """Return the demo config of a model, with smaller images and fewer of them."""
    from mmrepro.demo.shipped_configs import demo_config
    cfg = demo_config(model, data_root)
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
