"""Changes to the small detectors of tests/support/demo_runs.py for the matrices."""
import os


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
