"""Trained by tests/cli/test_seeds_verb.py, and for the picture in docs/how-to/seeds.md."""
custom_imports = dict(imports=['mmrepro', 'toy_plugin'], allow_failed_imports=False)
randomness = dict(seed=0, deterministic=True, numerics=dict(num_threads=1))
model = dict(type='MoonModel', width=3)
train_dataloader = dict(
    batch_size=10, num_workers=0, dataset=dict(type='Moons', count=60),
    sampler=dict(type='DefaultSampler', shuffle=True))
train_cfg = dict(by_epoch=True, max_epochs=6, val_interval=3)
optim_wrapper = dict(optimizer=dict(type='SGD', lr=0.2))
val_dataloader = dict(
    batch_size=100, num_workers=0, dataset=dict(type='Moons', count=1000, fixed=True),
    sampler=dict(type='DefaultSampler', shuffle=False))
val_evaluator = dict(type='Accuracy')
val_cfg = dict()
log_level = 'WARNING'
