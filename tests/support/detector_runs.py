"""Changes to the small detectors of the tests, and what their logs say."""
import json

from dev.zoo.training import WIDTHS


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
