"""Which kernels of a GPU are known to add with atomics, by the names that a profiler gives them."""
from __future__ import annotations

import os
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch

from dev.operator_check import disturbance
from mmrepro.doctor.atomic_kernels import atomic_kernels, recorded_kernels

# as a profiler prints them
ORDERED = [
    'void at::native::indexing_backward_kernel<float, 4>(long const*, long const*, float const*)',
    'void at::native::_scatter_gather_elementwise_kernel<128, 8, at::native::'
    '_cuda_scatter_gather_internal_kernel<true, at::native::OpaqueType<4>, 1l>::operator()<at::'
    'native::TensorAssign>(at::TensorIterator&)>',
    'void at::native::(anonymous namespace)::upsample_bilinear2d_out_frame<float, float>(int)',
    'void roi_align_forward_cuda_kernel<float>(int, float const*)',
    'sm80_xmma_wgrad_implicit_gemm_indexed_tf32f32_tf32f32_f32_nhwckrsc_nhwc', 'add_kernel']
ADDING = {
    'void at::native::(anonymous namespace)::grid_sampler_2d_backward_kernel<float, int>(int)':
        'grid_sample backward',
    'void at::native::_scatter_gather_elementwise_kernel<128, 8, at::native::'
    '_cuda_scatter_gather_internal_kernel<true, float, 1l>::operator()<at::native::ReduceAdd>':
        'scatter_add, gather backward',
    'void at::native::indexFuncSmallIndex<float, long, unsigned int, 2, 2, -2, true, '
    'at::native::ReduceAdd>(at::cuda::detail::TensorInfo<float>)': 'index_add',
    'void cudnn::cnn::wgrad_alg0_engine<float, 128, 6, 7, 3, 3, 5, false, 512>(int, int)':
        "cuDNN's filter gradient, algorithms 0 and 3",
    'void roi_align_backward_cuda_kernel<float>(int, float const*)':
        "mmcv's RoI operators backward",
    'void modulated_deformable_col2im_gpu_kernel<float>(int)':
        "mmcv's deformable convolution backward",
}


def test_names_of_kernels():
    assert atomic_kernels([*ORDERED, *ADDING]) == ADDING


def test_nothing_is_recorded_without_cuda():
    if torch.cuda.is_available():
        pytest.skip('there is a GPU')
    assert recorded_kernels(lambda: torch.ones(1) + 1) == []


class Properties:
    multi_processor_count = 132


def contexts(monkeypatch, request, create):
    """torch's module of green contexts, with another way to create one."""
    module = types.ModuleType('torch.cuda.green_contexts')
    module.SUPPORTED, module.GreenContext = True, types.SimpleNamespace(create=create)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(torch.cuda, 'get_device_properties', lambda index: Properties)
    monkeypatch.setattr(torch.cuda, 'synchronize', lambda: None)
    disturbance.fewer_multiprocessors.cache_clear()
    request.addfinalizer(disturbance.fewer_multiprocessors.cache_clear)
    zeros = torch.zeros
    monkeypatch.setattr(torch, 'zeros', lambda *size, device=None: zeros(*size))


def test_half_of_the_multiprocessors(monkeypatch, request):
    calls = []

    class Context:
        def set_context(self):
            calls.append('set')

        def pop_context(self):
            calls.append('pop')

    def create(num_sms, device_id):
        calls.append(num_sms)
        return Context()
    contexts(monkeypatch, request, create)
    context, why = disturbance.fewer_multiprocessors()
    assert isinstance(context, Context) and not why and calls == [64, 'set', 'pop']
    assert disturbance.fewer_multiprocessors()[0] is context, 'made once'


@pytest.mark.parametrize('kind', [RuntimeError, OSError])
def test_why_there_is_no_context_is_said(kind, monkeypatch, request):
    def create(num_sms, device_id):
        raise kind('CUDA error: operation not supported\nmore')
    contexts(monkeypatch, request, create)
    assert disturbance.fewer_multiprocessors() == (
        None, f'green contexts: {kind.__name__}: CUDA error: operation not supported')


SCRIPT = Path(__file__).resolve().parents[2] / 'tools' / 'gpu_atomics.sh'
COUNTS = '''==PROF== Connected
"ID","Kernel Name","Metric Name","Metric Unit","Metric Value"
"0","add_kernel","smsp__inst_executed_op_global_red.sum","inst","1,024"
"1","add_kernel","smsp__inst_executed_op_global_red.sum","inst","6"
"1","sort_kernel","smsp__inst_executed_op_global_atom.sum","inst","0"
'''


@pytest.mark.parametrize('counts, code', [(COUNTS, 0), ('==ERROR== ERR_NVGPUCTRPERM', 1)])
def test_the_script_adds_the_counts_of_a_kernel(tmp_path, counts, code):
    """With stubs of NVIDIA's tools: what is tested is what the script makes of their output."""
    (tmp_path / 'counts').write_text(counts)
    for name, lines in {
            'ncu': f'while [ "$1" != --log-file ]; do shift; done; cp {tmp_path}/counts "$2"',
            'compute-sanitizer': 'echo ERROR SUMMARY: 0 errors'}.items():
        (tmp_path / name).write_text(f'#!/bin/sh\n{lines}\n')
        (tmp_path / name).chmod(0o755)
    done = subprocess.run(
        ['bash', str(SCRIPT), str(tmp_path / 'out'), 'detectors/YOLOX$'], text=True,
        capture_output=True, env={**os.environ, 'PYTHON': sys.executable,
                                  'PATH': f'{tmp_path}{os.pathsep}{os.environ["PATH"]}'})
    assert done.returncode == code, done.stderr
    if code:
        assert 'atomics.csv says why' in done.stderr
    else:
        assert (tmp_path / 'out' / 'atomics.txt').read_text().split() == [
            '1030', 'smsp__inst_executed_op_global_red.sum', 'add_kernel']
        assert 'ERROR SUMMARY: 0 errors' in done.stdout


def test_the_script_names_a_tool_that_is_missing(tmp_path):
    for arguments, words in (([], 'Needs ncu'), (['out', 'row'], 'ncu is not on the path')):
        done = subprocess.run(['/bin/bash', str(SCRIPT), *arguments], text=True, cwd=tmp_path,
                              capture_output=True, env={**os.environ, 'PATH': '/usr/bin:/bin'})
        assert done.returncode == 2 and words in done.stderr
