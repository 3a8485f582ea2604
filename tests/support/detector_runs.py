"""Changes to the small detectors of the tests, and what their logs say."""
import json
import os

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


def accumulating(cfg):
    cfg.optim_wrapper.accumulative_counts = 4


def dynamic(cfg):
    import mmdet
    from mmengine.config import Config
    own = Config.fromfile(os.path.join(os.path.dirname(mmdet.__file__), '.mim', 'configs',
                                       'dynamic_rcnn/dynamic-rcnn_r50_fpn_1x_coco.py'))
    cfg.model = own.model
    cfg.model.backbone.init_cfg = None
    cfg.model.roi_head.bbox_head.num_classes = 6
    cfg.model.train_cfg.rcnn.dynamic_rcnn.update_iter_interval = 2
    cfg.model.train_cfg.rcnn.sampler.num = 128
    cfg.model.train_cfg.rpn_proposal.nms_pre = cfg.model.train_cfg.rpn_proposal.max_per_img = 300


def shallow(cfg):
    """ResNet-18: the state that matters here is elsewhere."""
    cfg.model.backbone.depth = 18
    cfg.model.neck.in_channels = [64, 128, 256, 512]


def light(cfg):
    """Most weights of a two-stage detector are in two layers; taking digests of them is slow."""
    shallow(cfg)
    if 'roi_head' in cfg.model:
        cfg.model.roi_head.bbox_head.fc_out_channels = 64


def light_teacher(cfg):
    light(type(cfg)(dict(model=cfg.model.detector)))


def shallow_detr(cfg):
    cfg.model.backbone.depth, cfg.model.neck.in_channels = 18, [128, 256, 512]
    for part in (cfg.model.encoder, cfg.model.decoder):
        part.num_layers = 3
