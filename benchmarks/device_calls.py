"""What each operator of mmcv costs on a GPU before its kernels run: calls, waits, memory.

    PYTHONPATH=tests/host_cuda:. MMREPRO_HOST_CUDA=LIBRARY python benchmarks/device_calls.py
    ... benchmarks/device_calls.py --detectors

``LIBRARY`` is the device made of the host (docs/evidence/gpu.md says how it is built).

For inputs of a detector's size (those of ``gpu_check``): operators of torch that run on the device,
forward and backward; how often the host waits for the device; the peak of memory above inputs,
outputs and gradients. Kernels of torch may launch several of the device and take a workspace.

``--detectors`` counts calls and waits of a training iteration: without mmrepro on a compiled mmcv,
in deterministic mode on a compiled mmcv, and in deterministic mode on mmcv-lite. There is no
compiled mmcv for this device: its operators count as what their source launches (:data:`COMPILED`),
and the PyTorch forms compute their results. These also compute what kernels in Triton should, after
the launches of these have been counted.
"""
from __future__ import annotations

import argparse
import collections
import contextlib
import logging
import os
import re

os.environ.setdefault('CUBLAS_WORKSPACE_CONFIG', ':4096:8')

import pretend
import torch

from dev.gpu_check.detector_inputs import images
from dev.gpu_check.zoo_configs import load
from dev.operator_check import cases_mmcv, cases_torch
from dev.operator_check.operator_cases import Inputs, OperatorCall, OperatorCase, tensors_of
from mmrepro import determinism, ops, patches, seeds
from mmrepro.ops import triton
from mmrepro.ops.aten import indexed_writes
from mmrepro.ops.operator_table import TABLE, implementation
from mmrepro.ops.provider import choose

# No kernel: another shape of the same memory, or memory that nobody fills.
FREE = re.compile(r'aten::(_?(un)?safe_)?(alias|as_strided|chunk|detach|diagonal|empty\w*|expand|'
                  r'narrow|new_empty|permute|_?reshape\w*|select|slice|split\w*|squeeze_?|t|t_|'
                  r'transpose_?|unbind|unfold|unsqueeze_?|view\w*|lift\w*)$')
# Launches of kernels in Triton are counted under this name; the kernels do not run.
TRITON = 'triton'
# The host waits in these.
WAITS = ('aten::_local_scalar_dense', 'aten::nonzero', 'aten::masked_select', 'aten::_unique2',
         'aten::equal', 'between host and device', 'repeat_interleave without output_size')


def _matching(inputs: Inputs) -> OperatorCall:
    """SimOTA's choice of candidates for 60 objects."""
    from mmdet.models.task_modules.assigners import SimOTAAssigner
    assigner = SimOTAAssigner()
    fixed = dict(cost=inputs.uniform(3000, 60), ious=inputs.uniform(3000, 60),
                 valid=inputs.uniform(8400).argsort() < 3000)
    return OperatorCall({}, fixed, lambda cost, ious, valid: assigner.dynamic_k_matching(
        cost, ious, 60, valid.clone()))


CASES = {**cases_mmcv.CASES, 'topk': cases_torch.CASES['topk'],
         'dynamic k, 60 objects': OperatorCase((), _matching)}

DETECTORS = {
    'Faster R-CNN': 'faster_rcnn/faster-rcnn_r50_fpn_1x_coco.py',
    'Mask R-CNN': 'mask_rcnn/mask-rcnn_r50_fpn_1x_coco.py',
    'RTMDet': 'rtmdet/rtmdet_tiny_8xb32-300e_coco.py',
    'DINO': 'dino/dino-4scale_r50_8xb2-12e_coco.py',
}
# Launches and waits of a compiled operator on CUDA: mmcv 2.1.0, mmcv/ops/csrc/pytorch/cuda/*.cu
COMPILED = {
    'roi_align_forward': (1, 0), 'roi_align_backward': (1, 0),
    'nms': (6, 1),  # sort, index_select, conflicts, zeros, sweep, masked_select
    'ms_deform_attn_forward': (2, 0), 'ms_deform_attn_backward': (1, 0),  # forward: zeros
    # forward: the largest label, on the host
    'sigmoid_focal_loss_forward': (3, 1), 'sigmoid_focal_loss_backward': (1, 0),
}
# Kernels that mmcv has, and whether a run is deterministic
PATHS = {'stock': ('cuda', False), 'compiled mmcv': ('cuda', True), 'mmcv-lite': ('', True)}

# Calls by name in addition to those of the device, or, below zero, not to be counted.
extra: collections.Counter = collections.Counter()


def count_launches() -> None:
    from triton.runtime.jit import JITFunction

    from mmrepro.ops.triton import write_kernels

    def run(self, *args, **kwargs):
        extra[TRITON] += 1
        with uncounted():
            for tensor in args:  # indices that nobody wrote would lead anywhere
                if isinstance(tensor, torch.Tensor) and tensor.dtype == torch.int32:
                    tensor.zero_()
    JITFunction.run = run
    triton.default_requirement = lambda: ''
    # what 'auto' chooses once a GPU has run them
    triton.SEEN_ON_GPU = frozenset({*triton.FUSED, triton.WRITES})
    write = write_kernels.write

    def written(target, indices, values, unique):
        with uncounted():
            copies = target.clone(), values.clone()
        write(copies[0], indices, copies[1], unique)
        with uncounted():
            indexed_writes.stock(target, indices, values)
    write_kernels.write = written


@contextlib.contextmanager
def uncounted():
    before = pretend.all_calls()
    yield
    extra.subtract(pretend.all_calls())
    extra.update(before)


def measure(function):
    """(result, calls, waits, peak of bytes above what was there, calls by name)."""
    pretend.forget_calls()
    extra.clear()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    result = function()
    peak = torch.cuda.max_memory_allocated() - before
    found = collections.Counter(pretend.all_calls())
    found.update(extra)
    return (result, sum(n for name, n in found.items() if not FREE.match(name)),
            sum(found[name] for name in WAITS), peak, +found)


def size(tensors) -> int:
    return sum(t.numel() * t.element_size() for t in tensors)


def row(problem) -> tuple[list, list[dict]]:
    """Return the columns of a problem, and every operator that ran, forward and backward."""
    inputs = [*problem.leaves.values(), *problem.fixed.values()]
    problem.run(**problem.leaves, **problem.fixed)  # constants that are made once
    result, calls, waits, peak, forward = measure(
        lambda: problem.run(**problem.leaves, **problem.fixed))
    outputs = [t for t in tensors_of(result) if t.is_cuda]
    owned = size(inputs) + size(outputs)
    columns = [calls, '', waits, '', f'{owned / 2**20:.1f}',
               f'{(peak - size(outputs)) / 2**20:.1f}', '']
    steep = [t for t in outputs if t.requires_grad]
    if not problem.leaves or not steep:
        return columns, [forward]
    upstream = [torch.ones_like(t) for t in steep]
    grads, calls, waits, peak, backward = measure(lambda: torch.autograd.grad(
        steep, list(problem.leaves.values()), upstream, allow_unused=True))
    columns[1], columns[3] = calls, waits
    columns[6] = f'{(peak - size(g for g in grads if g is not None)) / 2**20:.1f}'
    return columns, [forward, backward]


def take_path(kernels: str, deterministic: bool) -> None:
    """Let each operator of mmcv count as who provides it does, and compute its PyTorch form."""
    import mmcv.ops  # noqa: F401  whose functions refer to the extension
    from mmcv import _ext

    def counted(name):
        who = choose(name, 'auto' if deterministic else 'compiled', 'cuda', kernels, '').provider
        form = implementation(name)

        def operator(*args, **kwargs):
            if who == 'torch':
                return form(*args, **kwargs)
            with uncounted():
                if who == 'triton':
                    copies = [arg.detach().clone() if isinstance(arg, torch.Tensor)
                              and arg.is_floating_point() else arg for arg in args]
            if who == 'triton':
                triton.fused(name)(*copies, **kwargs)
            else:
                extra['compiled'] += COMPILED[name][0] - COMPILED[name][1]
                extra[WAITS[0]] += COMPILED[name][1]
            with uncounted():
                return form(*args, **kwargs)
        return operator

    for name, row in TABLE.items():
        if row.target and row.source != 'info.py':
            setattr(_ext, name, counted(name))


def iteration(config: str, deterministic: bool):
    """Measure the second iteration of a detector, with its own optimizer, on two small images."""
    from mmdet.utils import register_all_modules
    from mmengine.optim import build_optim_wrapper
    from mmengine.registry import MODELS
    register_all_modules(init_default_scope=True)
    cfg = load(config, small=False)
    seeds.seed_all(0, 'init')
    model = MODELS.build(cfg.model)
    model.init_weights()
    wrapper = build_optim_wrapper(model.cuda().train(), cfg.optim_wrapper)

    def step():
        seeds.seed_all(0, 'step', 0)
        batch = images(256)
        for sample in batch['data_samples'] if not model.with_mask else ():
            del sample.gt_instances.masks, sample.ignored_instances.masks
        return model.train_step(batch, wrapper)
    # mmcv's operators are those of `take_path`; this is for writes by index
    with determinism.deterministic(deterministic), ops.using('auto'):
        step()
        return measure(step)


def count_detectors(only: str, names: bool) -> None:
    logging.disable(logging.CRITICAL)  # MMEngine's goes to where the table goes
    print('| detector | path | calls | ratio | waits |')
    print('|---|---|---:|---:|---:|')
    for name, config in DETECTORS.items():
        stock = 0
        for path, (kernels, deterministic) in PATHS.items():
            if not re.search(only, f'{name}, {path}'):
                continue
            take_path(kernels, deterministic)
            patches.apply() if deterministic else patches.revert()
            _, calls, waits, _, found = iteration(config, deterministic)
            stock = stock or calls
            print(f'| {name} | {path} | {calls} | {calls / stock:.2f} | {waits} |', flush=True)
            if names:
                print(*sorted(found.items(), key=lambda pair: -pair[1]), sep='\n')


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument('--only', default='')
    parser.add_argument('--provider', choices=('torch', 'triton'), default='torch')
    parser.add_argument('--names', action='store_true', help='every operator and its calls')
    parser.add_argument('--detectors', action='store_true', help='a training iteration of each')
    args = parser.parse_args()
    if args.provider == 'triton' or args.detectors:
        count_launches()
    if args.detectors:
        count_detectors(args.only, args.names)
        return
    print('| operator | calls f | b | waits f | b | owned MiB | extra MiB f | b |')
    print('|---|---:|---:|---:|---:|---:|---:|---:|')
    patches.apply()
    for name, case in CASES.items():
        if re.search(args.only, name):
            with ops.using(args.provider), determinism.deterministic():
                columns, found = row(case.make(Inputs(False)).to('cuda'))
            print('|', ' | '.join(map(str, (name, *columns))), '|', flush=True)
            if args.names:
                print(*found, sep='\n')


if __name__ == '__main__':
    torch.set_num_threads(1)
    main()
