"""Training that repeats bit for bit. Text style, second in the list of bases:

    _base_ = ['mmdet::retinanet/retinanet_r50_fpn_1x_coco.py', './_base_/reproducible.py']

and lazy style:

    with read_base():
        from mmrepro.configs._base_.reproducible import *

Only keys that no base of MMDetection sets are set here, because MMEngine refuses a key that two
bases set. `env_cfg.cudnn_benchmark=True` in a base is not followed, and the log says so.
"""
# lazy configs do not run custom_imports; there, `runner_type` imports mmrepro
custom_imports = dict(imports=['mmrepro'], allow_failed_imports=False)
runner_type = 'mmrepro.ReproRunner'
randomness = dict(seed=42, deterministic=True)
