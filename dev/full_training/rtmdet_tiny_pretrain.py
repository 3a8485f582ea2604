"""RTMDet-tiny from random weights, on other images than those of ``rtmdet_tiny.py``.

The same bits on every x86-64 CPU, so that all runs that begin from it begin alike.
"""
_base_ = ['./rtmdet_tiny.py']

load_from = None
randomness = dict(seed=0, deterministic=True, numerics=dict(cpu='portable', num_threads=1))
train_dataloader = dict(dataset=dict(
    ann_file='annotations/instances_pretrain2017.json', data_prefix=dict(img='pretrain2017/')))
epochs = 25
train_cfg = dict(max_epochs=epochs, val_interval=5)
optim_wrapper = dict(optimizer=dict(lr=0.004))
param_scheduler = [
    dict(type='LinearLR', start_factor=0.01, by_epoch=False, begin=0, end=50),
    dict(type='CosineAnnealingLR', eta_min=0.0002, by_epoch=True, begin=epochs // 2, end=epochs,
         T_max=epochs - epochs // 2, convert_to_iter_based=True),
]
