"""What each operator of mmcv costs on a GPU before its kernels run: calls, waits, memory.

    python tests/host_cuda/count.py            # with the device of this folder

For inputs of a detector's size (those of ``gpu_check``): operators of torch that run on the device,
forward and backward; how often the host waits for the device; the peak of memory above inputs,
outputs and gradients. Kernels of torch may launch several of the device and take a workspace.
"""
from __future__ import annotations

import argparse
import os
import re

os.environ.setdefault('CUBLAS_WORKSPACE_CONFIG', ':4096:8')

import pretend
import torch

from dev.operator_check import cases_mmcv, cases_torch
from dev.operator_check.operator_cases import Inputs, OperatorCall, OperatorCase, tensors_of
from mmrepro import determinism, ops, patches

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

launches = [0]


def count_launches() -> None:
    from triton.runtime.jit import JITFunction

    def run(self, *args, **kwargs):
        launches[0] += 1
        for tensor in args:  # indices that nobody wrote would lead anywhere
            if isinstance(tensor, torch.Tensor) and tensor.dtype == torch.int32:
                tensor.zero_()
                launches[0] -= 1
    JITFunction.run = run


def measure(function):
    """(result, calls, waits, peak of bytes above what was there)."""
    pretend.forget_calls()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    result = function()
    peak = torch.cuda.max_memory_allocated() - before
    found = pretend.all_calls()
    found[TRITON], launches[0] = launches[0], 0
    return (result, sum(n for name, n in found.items() if not FREE.match(name)),
            sum(found.get(name, 0) for name in WAITS), peak, found)


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


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument('--only', default='')
    parser.add_argument('--provider', choices=('torch', 'triton'), default='torch')
    parser.add_argument('--names', action='store_true', help='every operator and its calls')
    args = parser.parse_args()
    if args.provider == 'triton':
        count_launches()
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
