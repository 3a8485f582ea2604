"""Detectors that have not been trained and keep what they find: a config, a file of weights."""
import torch
from demo_runs import small
from detector_runs import narrow
from harness import Child
from mmengine.registry import MODELS, init_default_scope

import mmrepro


def initialised(name, data_root, folder):
    """Return the paths of a small demo config and of its weights."""
    paths = str(folder / f'{name}.py'), str(folder / f'{name}.pth')

    def job():
        init_default_scope('mmdet')
        cfg = small(name, data_root)
        narrow(cfg)
        test = cfg.model.get('test_cfg') or {}
        for one in (test, *test.values()):
            if isinstance(one, dict) and 'score_thr' in one:
                one.score_thr = 0.
        cfg.dump(paths[0])
        mmrepro.set_random_seed(0)
        model = MODELS.build(cfg.model)
        model.init_weights()
        torch.save(dict(meta=dict(dataset_meta=dict(classes=tuple('abcdef'))),
                        state_dict=model.state_dict()), paths[1])

    Child(job).result()
    return paths
