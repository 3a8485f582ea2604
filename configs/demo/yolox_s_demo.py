_base_ = ['mmdet::yolox/yolox_s_8xb8-300e_coco.py', '../_base_/reproducible.py', './_data.py']

img_scale = _base_.demo_size

# Mosaic, MixUp and the multi-scale of a batch stay, because they are what is hard to repeat
model = dict(
    data_preprocessor=dict(batch_augments=[
        dict(type='BatchSyncRandomResize', random_size_range=(160, 224), size_divisor=32,
             interval=2)
    ]),
    bbox_head=dict(num_classes=len(_base_.demo_classes)))

train_pipeline = [
    dict(type='Mosaic', img_scale=img_scale, pad_val=114.0),
    dict(type='RandomAffine', scaling_ratio_range=(0.5, 1.5),
         border=(-img_scale[0] // 2, -img_scale[1] // 2)),
    dict(type='MixUp', img_scale=img_scale, ratio_range=(0.8, 1.6), pad_val=114.0),
    dict(type='YOLOXHSVRandomAug'),
    dict(type='RandomFlip', prob=0.5),
    dict(type='Resize', scale=img_scale, keep_ratio=True),
    dict(type='Pad', pad_to_square=True, pad_val=dict(img=(114.0, 114.0, 114.0))),
    dict(type='FilterAnnotations', min_gt_bbox_wh=(1, 1), keep_empty=False),
    dict(type='PackDetInputs'),
]
train_dataloader = dict(
    batch_size=4, num_workers=0, persistent_workers=False,
    dataset=dict(dataset=_base_.demo_train, pipeline=train_pipeline))
val_dataloader = _base_.demo_square_val_loader
test_dataloader = val_dataloader
val_evaluator = _base_.demo_evaluator
test_evaluator = val_evaluator

train_cfg = dict(max_epochs=2, val_interval=1)
param_scheduler = [dict(type='LinearLR', start_factor=0.1, by_epoch=False, begin=0, end=5)]
default_hooks = _base_.demo_hooks
custom_hooks = [
    # closes Mosaic and MixUp for the second epoch
    dict(type='YOLOXModeSwitchHook', num_last_epochs=1, priority=48),
    dict(type='SyncNormHook', priority=48),
    dict(type='EMAHook', ema_type='ExpMomentumEMA', momentum=0.0001, update_buffers=True,
         priority=49),
]
