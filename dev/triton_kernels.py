"""Compile the kernels in Triton for GPUs that are not here, and say what they need.

    python -m dev.triton_kernels --out docs/results/triton_kernels.json

Every kernel is compiled for each architecture, type and specialization that its callers produce.
Registers and memory are those that ``cuobjdump --dump-resource-usage`` of Triton reports.
"""
from __future__ import annotations

import argparse
import json
import re
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

ARCHITECTURES = (80, 90, 100)  # compute capability, times ten
DTYPES = ('float32', 'float16', 'bfloat16', 'float64')
FIRST_WITH = {100: (3, 3)}  # the first release of Triton that compiles for it
DISASSEMBLES = (3, 3)  # likewise, that shows the machine code
USAGE = dict(registers='REG', stack='STACK', shared='SHARED', local='LOCAL')  # bytes, but registers


class NoDevice:
    """What the compiler asks of a driver."""

    def __init__(self, target: Any) -> None:
        import torch
        self.get_current_target = lambda: target
        # a number of its own: what is compiled is kept for each device
        self.get_current_device = lambda: target.arch
        self.get_current_stream = lambda device=0: 0
        self.get_active_torch_device = lambda: torch.device('cpu')
        self.map_python_to_cpp_type = str
        self.get_device_interface = lambda: torch.cuda


def version() -> tuple[int, ...]:
    """Return the major and minor version of Triton."""
    import triton
    return tuple(map(int, triton.__version__.split('.')[:2]))


def compiled(architectures: Sequence[int], dtypes: Sequence[str] = DTYPES) -> list[dict[str, Any]]:
    """Return kernel, architecture, dtype, ptx, sass, and the resources, per specialization."""
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver, jit

    rows: dict[str, dict[str, Any]] = {}
    launch, now = jit.JITFunction.run, {}

    def run(self: Any, *args: Any, **kwargs: Any) -> None:
        kernel = launch(self, *args, **{**kwargs, 'warmup': True})
        row = dict(kernel=self.__name__.strip('_'), **now, ptx=kernel.asm['ptx'], sass='')
        key = f'{row["architecture"]} {row["ptx"]}'  # one for all callers that share it
        if key not in rows:
            row.update(usage(kernel.asm['cubin']))
            if version() >= DISASSEMBLES:
                row.update(sass=kernel.asm['sass'])
            rows[key] = row

    jit.JITFunction.run = run
    try:
        for architecture in architectures:
            if version() >= FIRST_WITH.get(architecture, (0, )):
                driver.set_active(NoDevice(GPUTarget('cuda', architecture, 32)))
                for dtype in _calls(dtypes):
                    now.update(architecture=architecture, dtype=str(dtype).split('.')[-1])
    finally:
        jit.JITFunction.run = launch
    return list(rows.values())


def _calls(dtypes: Sequence[str]) -> Iterator[Any]:
    """Call the operators with the shapes and alignments of detectors; yields each type before."""
    import torch

    from mmrepro.ops import gather
    from mmrepro.ops.triton import attention_kernels, nms_kernels, roi_align_kernels, write_kernels
    from mmrepro.util.scoped import replaced

    with replaced(gather, scatter_sum=lambda source, row, weight, size: source.new_zeros(
            size, source.shape[1])):
        for dtype in (getattr(torch, name) for name in dtypes):
            yield dtype
            feature, nothing = torch.zeros(2, 256, 100, 168, dtype=dtype), torch.zeros(0)
            rois = torch.tensor([[0, 1, 1, 50, 50.], [1, 2, 2, 90, 90.]], dtype=dtype)
            grad = torch.zeros(2, 256, 7, 7, dtype=dtype)
            arguments = (7, 7, 1 / 8, 0, 1, True)
            # and a map of one line: numbers that are 1 become part of the kernel
            for part in (feature, feature[:, :, :1]):
                roi_align_kernels.roi_align_forward(part, rois, grad, nothing, nothing, *arguments)
                roi_align_kernels.roi_align_backward(grad, rois, nothing, nothing, part, *arguments)
            shapes, starts = torch.tensor([[25, 42], [13, 21]]), torch.tensor([0, 1050])
            inputs = (torch.zeros(2, 1323, 8, 32, dtype=dtype), shapes, starts,
                      torch.zeros(2, 10, 8, 2, 4, 2, dtype=dtype),
                      torch.zeros(2, 10, 8, 2, 4, dtype=dtype))
            attention_kernels.ms_deform_attn_forward(*inputs, 64)
            attention_kernels.ms_deform_attn_backward(
                *inputs, torch.zeros(2, 10, 256, dtype=dtype), inputs[0], inputs[3], inputs[4], 64)
        yield torch.float32
        for count in (1, 2000, 30000):
            nms_kernels.nms(torch.rand(count, 4), torch.rand(count), .5, count % 2)
        index = torch.zeros(40, dtype=torch.int64)
        for dtype in (torch.uint8, torch.float16, torch.float32, torch.int64):
            target = torch.zeros(40, 90, 4, dtype=dtype)
            write_kernels.write(target[0], [index], target[0, :40], False)
            write_kernels.write(target, [index, index], target[0, :40], False)


def usage(cubin: bytes) -> dict[str, int]:
    """Return the registers of a thread, and bytes of stack, shared and local memory."""
    import triton.backends.nvidia as nvidia
    program = Path(nvidia.__file__).parent / 'bin' / 'cuobjdump'
    with tempfile.NamedTemporaryFile(suffix='.cubin') as file:
        file.write(cubin)
        file.flush()
        text = subprocess.run([str(program), '--dump-resource-usage', file.name], check=True,
                              capture_output=True, text=True).stdout
    return {name: int(re.search(rf'{word}:(\d+)', text)[1])  # type: ignore[index]
            for name, word in USAGE.items()}


def summary(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the most that a kernel needs on an architecture, and its specializations there."""
    found = []
    for name in sorted({row['kernel'] for row in rows}):
        for architecture in ARCHITECTURES:
            own = [row for row in rows if (row['kernel'], row['architecture']) == (
                name, architecture)]
            if own:
                found.append(dict(kernel=name, architecture=architecture, compiled=len(own), **{
                    key: max(row[key] for row in own) for key in USAGE}))
    return found


def table(report: Mapping[str, Any]) -> str:
    """Return the published figures as Markdown."""
    lines = ['| kernel | compiled | registers | stack, bytes | shared, KiB | local |',
             '|---|---|---|---|---|---|']
    for name in dict.fromkeys(row['kernel'] for row in report['rows']):
        own = [row for row in report['rows'] if row['kernel'] == name]
        cells = [' / '.join(str(row[key]) for row in own) for key in (
            'compiled', 'registers', 'stack')]
        shared = ' / '.join(f'{row["shared"] / 1024:.1f}' for row in own)
        local = ' / '.join(str(row['local']) for row in own)
        lines.append(f'| `{name}` | {" | ".join(cells)} | {shared} | {local} |')
    names = ' / '.join(f'sm_{architecture}' for architecture in ARCHITECTURES)
    return '\n'.join([*lines, '', f'Figures for {names}; Triton {report["triton"]}.'])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--out', required=True)
    parser.add_argument('--code', action='store_true', help='the code of every specialization')
    parser.add_argument('--architectures', nargs='+', type=int, default=ARCHITECTURES,
                        choices=ARCHITECTURES, help='default: all of them')
    parser.add_argument('--dtypes', nargs='+', default=DTYPES, choices=DTYPES,
                        help='of features, default: all of them')
    args = parser.parse_args()
    import triton
    rows = compiled(args.architectures, args.dtypes)
    report = dict(triton=triton.__version__, rows=rows if args.code else summary(rows))
    Path(args.out).write_text(json.dumps(report, indent=0) + '\n')


if __name__ == '__main__':
    main()
