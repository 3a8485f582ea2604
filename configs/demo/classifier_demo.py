"""A small image classifier for MMEngine alone: neither MMDetection nor mmcv is needed."""
_base_ = ['../_base_/reproducible.py']

default_scope = 'mmengine'
model = dict(type='mmrepro.demo.classifier.PhotoClassifier')
train_dataloader = dict(
    batch_size=4, num_workers=0, persistent_workers=False,
    sampler=dict(type='DefaultSampler', shuffle=True), collate_fn=dict(type='default_collate'),
    dataset=dict(
        type='mmrepro.demo.classifier.PhotoDataset', length=24,
        pipeline=[dict(type='mmrepro.demo.classifier.CutOut', jitter=0.15, flip=0.5),
                  dict(type='mmrepro.demo.classifier.Pack')]))
val_dataloader = dict(
    batch_size=4, num_workers=0, persistent_workers=False,
    sampler=dict(type='DefaultSampler', shuffle=False), collate_fn=dict(type='default_collate'),
    dataset=dict(
        type='mmrepro.demo.classifier.PhotoDataset', length=12, test_mode=True,
        pipeline=[dict(type='mmrepro.demo.classifier.CutOut'),
                  dict(type='mmrepro.demo.classifier.Pack')]))
test_dataloader = val_dataloader
val_evaluator = dict(type='mmrepro.demo.classifier.Accuracy')
test_evaluator = val_evaluator

train_cfg = dict(by_epoch=True, max_epochs=4, val_interval=2)
val_cfg = dict()
test_cfg = dict()
optim_wrapper = dict(optimizer=dict(type='SGD', lr=0.05, momentum=0.9))
param_scheduler = [dict(type='LinearLR', start_factor=0.1, by_epoch=False, begin=0, end=5)]
default_hooks = dict(logger=dict(type='LoggerHook', interval=1),
                     checkpoint=dict(type='CheckpointHook', interval=1, max_keep_ckpts=2))
