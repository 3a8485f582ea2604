"""The same data, augmentations and initial weights for the same seed, with the fastest kernels.

Losses of two runs agree to rounding at first and then drift apart; use reproducible.py for equal
bits. Text style, second in the list of bases:

    _base_ = ['mmdet::retinanet/retinanet_r50_fpn_1x_coco.py', './_base_/seeded.py']

For the fastest convolutions, set `env_cfg = dict(cudnn_benchmark=True)` in the config itself:
MMEngine refuses a key that two bases set, and MMDetection's bases set `env_cfg`.
"""
# lazy configs do not run custom_imports; there, `runner_type` imports mmrepro
custom_imports = dict(imports=['mmrepro'], allow_failed_imports=False)
runner_type = 'mmrepro.ReproRunner'
randomness = dict(seed=42, deterministic=False)
