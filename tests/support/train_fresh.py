"""Train a small demo config in this fresh process; prints the record of the harness as JSON.

Usage: train_fresh.py MODEL DATA_ROOT START_METHOD WORK_DIR
"""
import json
import sys


def main():
    import one_thread  # noqa: F401  before torch

    # isort: split
    import torch
    from demo_runs import narrow, small, workers
    from harness import train
    model, data_root, start, work_dir = sys.argv[1:]
    torch.set_num_threads(1)
    cfg = small(model, data_root)
    narrow(cfg)
    workers(1, start=start)(cfg)
    result = train(cfg, work_dir)
    import mmcv._ext
    result['mmcv_is_compiled'] = hasattr(mmcv._ext, '__file__') and bool(mmcv._ext.__file__)
    print(f'\n{json.dumps(result)}')


if __name__ == '__main__':
    main()
