"""RTMDet-tiny, from the weights of ``rtmdet_tiny_pretrain.py`` without the layer of classes."""
_base_ = ['mmdet::rtmdet/rtmdet_tiny_8xb32-300e_coco.py', './_data.py']

size = _base_.digits_size
norm_cfg = dict(type='BN')
model = dict(
    use_syncbn=False,
    backbone=dict(norm_cfg=norm_cfg, init_cfg=None),
    neck=dict(norm_cfg=norm_cfg),
    bbox_head=dict(norm_cfg=norm_cfg, num_classes=10))
train_pipeline = [
    dict(type='LoadImageFromFile'),
    dict(type='LoadAnnotations', with_bbox=True),
    dict(type='RandomResize', scale=size, ratio_range=(0.7, 1.3), keep_ratio=True),
    dict(type='RandomCrop', crop_size=size),
    dict(type='YOLOXHSVRandomAug'),
    dict(type='Pad', size=size, pad_val=dict(img=(114, 114, 114))),
    dict(type='PackDetInputs'),
]
train_dataloader = dict(
    batch_size=5, num_workers=0, persistent_workers=False,
    dataset=dict(**_base_.digits_set, pipeline=train_pipeline))
val_dataloader = _base_.digits_val_loader
test_dataloader = val_dataloader
val_evaluator = _base_.digits_evaluator
test_evaluator = val_evaluator

load_from = 'pretrained/rtmdet_tiny.pth'
epochs = 10
train_cfg = dict(max_epochs=epochs, val_interval=1, dynamic_intervals=None)
optim_wrapper = dict(optimizer=dict(lr=0.002))
param_scheduler = [
    dict(type='LinearLR', start_factor=0.01, by_epoch=False, begin=0, end=50),
    dict(type='CosineAnnealingLR', eta_min=0.0001, by_epoch=True, begin=epochs // 2, end=epochs,
         T_max=epochs // 2, convert_to_iter_based=True),
]
default_hooks = dict(checkpoint=dict(interval=1, max_keep_ckpts=1))
custom_hooks = [
    dict(type='EMAHook', ema_type='ExpMomentumEMA', momentum=0.0002, gamma=200,
         update_buffers=True, priority=49),
]
