"""Which kernels of a GPU are known to add with atomics, by the names that a profiler gives them."""
import os
import re
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch

from dev.gpu_check.atomic_kernels import atomic_kernels, recorded_kernels
from dev.operator_check import disturbance
from mmrepro.ops.aten import kernel_table

# as a profiler prints them
ORDERED = [
    'void at::native::indexing_backward_kernel<float, 4>(long const*, long const*, float const*)',
    'void at::native::_scatter_gather_elementwise_kernel<128, 8, at::native::'
    '_cuda_scatter_gather_internal_kernel<true, at::native::OpaqueType<4>, 1l>::operator()<at::'
    'native::TensorAssign>(at::TensorIterator&)>',
    'void at::native::(anonymous namespace)::upsample_bilinear2d_out_frame<float, float>(int)',
    'void roi_align_forward_cuda_kernel<float>(int, float const*)',
    'sm80_xmma_wgrad_implicit_gemm_indexed_tf32f32_tf32f32_f32_nhwckrsc_nhwc', 'add_kernel',
    'void at_cuda_detail::cub::DeviceScanKernel<cub::ScanTileState<long, true>>(long*)',
    'void cublasLt::splitKreduce_kernel<32, 16, int, float, float>(float*)',
    'void flash_fwd_kernel<Flash_fwd_kernel_traits<32, 128>>(Flash_fwd_params)',
    'fmha_cutlassF_f32_aligned_64x64_rf_sm80(AttentionKernel<float>::Params)',
    'triton_per_fused_cumsum_0']
ADDING = {
    'void at::native::(anonymous namespace)::grid_sampler_2d_backward_kernel<float, int>(int)':
        'grid_sample backward',
    'void at::native::_scatter_gather_elementwise_kernel<128, 8, at::native::'
    '_cuda_scatter_gather_internal_kernel<true, float, 1l>::operator()<at::native::ReduceAdd>':
        'scatter_add, gather backward',
    'void at::native::indexFuncSmallIndex<float, long, unsigned int, 2, 2, -2, true, '
    'at::native::ReduceAdd>(at::cuda::detail::TensorInfo<float>)': 'index_add, index_reduce',
    'void cudnn::cnn::wgrad_alg0_engine<float, 128, 6, 7, 3, 3, 5, false, 512>(int, int)':
        "cuDNN's filter gradient, algorithms 0 and 3",
    'void roi_align_backward_cuda_kernel<float>(int, float const*)':
        "mmcv's RoI operators backward",
    'void modulated_deformable_col2im_gpu_kernel<float>(int)':
        "mmcv's deformable convolution backward",
}


# Pattern of operators that torch refuses or runs without order, and a kernel of theirs.
OF_OPERATORS = {
    r'_?upsample_\w+_backward': 'void upsample_gen2d_aa_backward_out_frame<float, float>(int)',
    r'(reflection|replication)_pad\dd_backward':
        'void reflection_pad2d_backward_out_kernel<float>(float*)',
    r'_?adaptive_avg_pool\dd_backward': 'void atomic_adaptive_average_gradinput<float>(float*)',
    r'adaptive_max_pool\dd_backward': 'void atomicadaptivemaxgradinput<float>(float*)',
    'avg_pool3d_backward': 'void avg_pool3d_cuda_update_grad_input_atomic<float, float>(int)',
    r'(fractional_max_pool\dd|max_pool3d_with_indices)_backward':
        'void fractional_max_pool2d_backward_out_cuda_frame<float>(int)',
    r'max_unpool\dd': 'void at::native::max_unpooling2d_forward_kernel<float>(long)',
    r'grid_sampler_\dd_backward': 'void grid_sampler_3d_backward_kernel<float, int>(int)',
    'cudnn_grid_sampler_backward': 'void cudnn::detail::bilinear_sampler_bwd_4d<float>(float)',
    'put': 'void at::native::cuda_take_put_kernel<float, long>(at::TensorIterator&)',
    'histc|bincount': 'void at::cuda::kernelHistogram1D<float, float, int, 1, 2, -1>(float)',
    '(nan)?median': 'void at::native::gatherMedian<float, unsigned int, 1>(float*)',
    '_ctc_loss_backward': 'void ctc_loss_backward_collect_nonblank_gpu_kernel<float, long>(float*)',
    'index_reduce': 'void indexFuncLargeIndex<float, long, 2, 2, -2, true, ReduceMultiply>(int)',
    'scatter(_reduce)?': 'void _scatter_gather_elementwise_kernel<128, 8, ReduceMultiply>(int)',
    'nll_loss2d_forward': 'void nll_loss2d_forward_kernel<float, float, long>(float*)',
    'cumprod|_?logcumsumexp': 'void cub::DeviceScanKernel<cub::ScanTileState<float, true>>(float*)',
    '_(scaled_dot_product_)?cudnn_attention(_(for|back)ward)?':
        'cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16_knob_3_64x128x64',
    'topk': 'void at::native::mbtopk::gatherTopK<float, unsigned int, 1>(int)',
}
# What the flags keep in order, or change the name of.
MORE = {'void flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel<traits>(Flash_bwd_params)',
        'fmha_cutlassB_f32_aligned_64x64_k64_sm80(AttentionBackwardKernel<float>::Params)',
        'fmha_v2_flash_attention_fp16_64_sm80_bwd_kernel', 'triton_spl_fused_cumsum_0',
        'void thrust::cuda_cub::cub::DeviceReduceByKeyKernel<policy, int*, float*>(float*)',
        'void at_cuda_detail::cub::DeviceScanKernel<policy, c10::Half const*>(c10::Half*)',
        'cutlass_80_tensorop_s1688gemm_64x64_16x6_nn_align4_splitK', 'sm90_gemm_streamK_f32'}


def refused_or_silent():
    """Operators of the table, by name, whatever the release; of families their own names."""
    rows = {row.operator.partition('.')[0].rstrip('_') for row in kernel_table.TABLE
            if row.torch in ('raises', 'silent') and row.since <= (2, 13) < row.until}
    names = {name.partition('::')[2].partition('.')[0].rstrip('_')
             for name in torch._C._dispatch_get_all_op_names() if name.startswith('aten::')}
    return sorted(rows | {name for name in names for family in [kernel_table.family_of(name)]
                          if family and family.torch in ('raises', 'silent')})


def test_every_operator_out_of_order_has_a_name():
    names = refused_or_silent()
    assert len(names) > 35
    assert [name for name in names
            if not any(re.fullmatch(pattern, name) for pattern in OF_OPERATORS)] == []
    kernels = {*OF_OPERATORS.values(), *MORE}
    # torch's topk is in order on NVIDIA GPUs: only its ties are not specified
    assert kernels - set(atomic_kernels(kernels)) == {OF_OPERATORS['topk']}


def test_names_of_kernels():
    assert atomic_kernels([*ORDERED, *ADDING]) == ADDING


def test_nothing_is_recorded_without_cuda():
    if torch.cuda.is_available():
        pytest.skip('there is a GPU')
    assert recorded_kernels(lambda: torch.ones(1) + 1) == []


def contexts(monkeypatch, request, create):
    """torch's module of green contexts, with another way to create one."""
    module = types.ModuleType('torch.cuda.green_contexts')
    module.SUPPORTED, module.GreenContext = True, types.SimpleNamespace(create=create)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    properties = types.SimpleNamespace(multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, 'get_device_properties', lambda index: properties)
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
