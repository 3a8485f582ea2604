"""Measure an iteration and an inference of twelve detectors beside stock MMDetection.

    python benchmarks/detectors.py DATA_ROOT [--models NAME ...] [--sizes 320x224 1344x800]
        [--task train test] [--rounds N] [--out FILE]

DATA_ROOT is COCO-format data (`mmrepro demo --data-only`). Needs compiled mmcv, whose operators
stock MMDetection uses. Each detector runs in two processes, with one thread each: in one stock
MMEngine trains, in the other mmrepro with ``deterministic=True``. The two take turns, an iteration
each, so that at any time only one of them computes; the measure is processor time. All hooks of the
config run. The loading of a batch is outside of what is timed, and so are the steps that a run
repeats (benchmarks/step_checks.py) and the witness (benchmarks/witness.py). Weights are not
trained, so few of their boxes would pass a threshold: inference (`--task test`, an image at a time)
has the six classes of the data and no threshold, so that all candidates reach NMS. Prints a
Markdown table, writes JSON.
"""
from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from dev.versions.models import set_everywhere  # noqa: E402

CONFIGS = {
    'Faster R-CNN': 'faster_rcnn/faster-rcnn_r50_fpn_1x_coco',
    'Faster R-CNN, deformable convolutions': 'dcn/faster-rcnn_r50-dconv-c3-c5_fpn_1x_coco',
    'Mask R-CNN': 'mask_rcnn/mask-rcnn_r50_fpn_1x_coco',
    'Cascade Mask R-CNN': 'cascade_rcnn/cascade-mask-rcnn_r50_fpn_1x_coco',
    'RetinaNet': 'retinanet/retinanet_r50_fpn_1x_coco',
    'ATSS': 'atss/atss_r50_fpn_1x_coco',
    'RTMDet-tiny': 'rtmdet/rtmdet_tiny_8xb32-300e_coco',
    'YOLOX-tiny': 'yolox/yolox_tiny_8xb8-300e_coco',
    'SOLOv2': 'solov2/solov2_r50_fpn_1x_coco',
    'DETR': 'detr/detr_r50_8xb2-150e_coco',
    'Deformable DETR': 'deformable_detr/deformable-detr_r50_16xb2-50e_coco',
    'DINO': 'dino/dino-4scale_r50_8xb2-12e_coco',
}
WAYS = ('stock', 'mmrepro')
WARM = 2  # iterations of each way that are not counted
CLASSES = ('person', 'cat', 'cup', 'motorcycle', 'rocket', 'coin')


def settings(task: str, name: str, width: int, height: int, data_root: str, iterations: int
             ) -> Any:
    """Return the config of a detector with small data, without pretrained weights."""
    from mmengine.hub import get_config
    cfg = get_config(f'mmdet::{CONFIGS[name]}.py')
    if task == 'test':
        set_everywhere(cfg.model, 'num_classes', len(CLASSES))
        set_everywhere(cfg.model.test_cfg, 'score_thr', 0.)
    masks = name in ('Mask R-CNN', 'Cascade Mask R-CNN', 'SOLOv2')
    load = [dict(type='LoadImageFromFile'),
            dict(type='LoadAnnotations', with_bbox=True, with_mask=masks),
            dict(type='Resize', scale=(width, height), keep_ratio=False)]
    keys = ('img_id', 'img_path', 'ori_shape', 'img_shape', 'scale_factor')
    data = dict(type='CocoDataset', data_root=data_root, metainfo=dict(classes=CLASSES))
    cfg.train_dataloader = dict(
        batch_size=2, num_workers=0, sampler=dict(type='InfiniteSampler', shuffle=True),
        dataset=dict(data, ann_file='annotations/instances_train2017.json',
                     data_prefix=dict(img='train2017/'), filter_cfg=dict(filter_empty_gt=True),
                     pipeline=[*load, dict(type='RandomFlip', prob=0.5),
                               dict(type='PackDetInputs')]))
    cfg.test_dataloader = dict(
        batch_size=1, num_workers=0, sampler=dict(type='DefaultSampler', shuffle=False),
        dataset=dict(data, ann_file='annotations/instances_train2017.json', test_mode=True,
                     data_prefix=dict(img='train2017/'),
                     pipeline=[*load, dict(type='PackDetInputs', meta_keys=keys)]))
    cfg.test_evaluator = dict(type='DumpResults', out_file_path='results.pkl')
    cfg.val_dataloader = cfg.val_evaluator = cfg.val_cfg = None
    cfg.train_cfg = dict(type='TurnsTrainLoop', max_iters=iterations)
    cfg.test_cfg = dict(type='TurnsTestLoop')
    cfg.param_scheduler, cfg.load_from = None, None
    cfg.model.data_preprocessor.pop('batch_augments', None)  # other sizes of the images
    cfg.model.backbone.init_cfg = None
    cfg.default_hooks.checkpoint = None
    cfg.custom_hooks = [hook for hook in cfg.get('custom_hooks') or ()
                        if hook['type'] not in ('PipelineSwitchHook', 'YOLOXModeSwitchHook')]
    return cfg


def work(way: str, task: str, name: str, size: tuple[int, int], data_root: str, iterations: int,
         connection: Any) -> None:
    """Run an iteration for each message, and answer with its processor time."""
    import torch
    torch.set_num_threads(1)
    if way == 'mmrepro':
        import mmrepro  # noqa: F401
    from mmdet.utils import register_all_modules
    from mmengine.registry import LOOPS
    from mmengine.runner import IterBasedTrainLoop, Runner, TestLoop
    register_all_modules()

    def turn(iterate: Any) -> None:
        connection.recv()
        start = time.process_time()
        iterate()
        connection.send(time.process_time() - start)

    @LOOPS.register_module()
    class TurnsTrainLoop(IterBasedTrainLoop):
        def run_iter(self, data_batch: Any) -> None:
            turn(lambda: super(TurnsTrainLoop, self).run_iter(data_batch))

    @LOOPS.register_module()
    class TurnsTestLoop(TestLoop):
        def run_iter(self, idx: int, data_batch: Any) -> None:
            turn(lambda: super(TurnsTestLoop, self).run_iter(idx, data_batch))

    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        cfg = settings(task, name, *size, data_root, iterations)
        cfg.work_dir, cfg.log_level = folder, 'ERROR'
        if way == 'mmrepro':
            cfg.randomness = dict(seed=1, deterministic=True, numerics=dict(num_threads=1),
                                  self_checks=dict(steps=0, witness=False))
        else:
            cfg.randomness = dict(seed=1)
        runner = Runner.from_cfg(cfg)
        getattr(runner, task)()


def measure(task: str, name: str, size: tuple[int, int], data_root: str, rounds: int
            ) -> dict[str, list[float]]:
    """Return the seconds of each counted iteration of both ways."""
    context = multiprocessing.get_context('spawn')
    connections, processes = {}, []
    for way in WAYS:
        connections[way], child = context.Pipe()
        processes.append(context.Process(target=work, daemon=True, args=(
            way, task, name, size, data_root, rounds + WARM, child)))
        processes[-1].start()
        child.close()
    times: dict[str, list[float]] = {way: [] for way in WAYS}
    try:
        for number in range(rounds + WARM):
            # the order alternates as well: the second finds other things in the caches
            for way in WAYS if number % 2 else WAYS[::-1]:
                connections[way].send(None)
                seconds = connections[way].recv()
                if number >= WARM:
                    times[way].append(seconds)
    finally:
        for process in processes:
            process.kill()
            process.join()
    return times


def summary(times: dict[str, list[float]]) -> dict[str, float]:
    """Return medians of both ways, and the median and quartiles of the ratios of the rounds."""
    ratios = [ours / stock for stock, ours in zip(times['stock'], times['mmrepro'])]
    low, middle, high = statistics.quantiles(ratios, n=4)
    return dict(stock_s=statistics.median(times['stock']), ratio=middle, low=low, high=high,
                mmrepro_s=statistics.median(times['mmrepro']))


def table(result: dict[str, Any]) -> str:
    """Return what ``--out`` wrote as Markdown: a row for each detector, a column for each run."""
    measured = result['measured']
    lines = ['| detector | ' + ' | '.join(measured) + ' |', '|---' * (len(measured) + 1) + '|']
    for name in CONFIGS:
        cells = []
        for rows in measured.values():
            row = rows.get(name)
            cells.append('' if row is None else f'**{row["ratio"]:.2f}** ({row["low"]:.2f} to '
                         f'{row["high"]:.2f}) of {row["stock_s"]:.2f} s')
        if any(cells):
            lines.append(f'| {name} | ' + ' | '.join(cells) + ' |')
    means = [math.exp(statistics.mean(math.log(row['ratio']) for row in rows.values()))
             for rows in measured.values()]
    lines.append('| geometric mean | ' + ' | '.join(f'**{mean:.2f}**' for mean in means) + ' |')
    return '\n'.join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('data_root', type=os.path.abspath)
    parser.add_argument('--models', nargs='+', choices=CONFIGS, default=list(CONFIGS))
    parser.add_argument('--sizes', nargs='+', default=['320x224'], help='width x height')
    parser.add_argument('--task', nargs='+', choices=('train', 'test'), default=['train'])
    parser.add_argument('--rounds', type=int, default=12, help='iterations that are counted')
    parser.add_argument('--out', type=Path, help='write JSON here')
    args = parser.parse_args()
    import mmcv
    import torch

    from mmrepro.facts.collect import cpu_name
    measured: dict[str, dict[str, dict[str, float]]] = {}
    result = dict(cpu=cpu_name(), torch=torch.__version__, mmcv=mmcv.__version__,
                  rounds=args.rounds, measured=measured)
    for task in args.task:
        for text in args.sizes:
            width, height = map(int, text.split('x'))
            rows = measured.setdefault(f'{task} {text}', {})
            for name in args.models:
                times = measure(task, name, (width, height), args.data_root, args.rounds)
                rows[name] = summary(times)
                print(f'{task} {text} {name}: {rows[name]}', file=sys.stderr, flush=True)
                if args.out:
                    args.out.write_text(json.dumps(result, indent=1) + '\n')
    print(table(result))


if __name__ == '__main__':
    main()
