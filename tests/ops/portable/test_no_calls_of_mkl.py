"""With ``cpu='portable'`` nothing calls what depends on the CPU: calls are counted."""
import json
import shutil
import sys

import pytest
from harness import python

from dev import mkl_calls
from mmrepro.determinism import missing_at_start
from mmrepro.ops.portable.table import REFUSED, REFUSED_SPARSE, ROUTED

# torch's samples of the operators that call MKL, by the names of its tests
NAMES = ('^(acos|addbmm|addmm|addmv|asin|atan|baddbmm|bmm|cos|dot|erf|erfc|erfinv|exp|inner|log|'
         'log10|log2|logsumexp|mm|mv|pow|sin|sqrt|tan|tanh|vdot|cdist|cholesky|fft.rfft|'
         'linalg.(inv|qr|norm)|matrix_exp|nn.functional.(bilinear|conv1d|conv2d|conv3d|'
         'conv_transpose2d|embedding_bag|linear|scaled_dot_product_attention|soft_margin_loss)|'
         'sparse.sampled_addmm)$')
# operators that call others of the table
COMPOSED = {'logsumexp', '_trilinear', 'soft_margin_loss', 'soft_margin_loss_backward',
            'linalg_matrix_exp', 'linalg_pinv'}
SWEEP = '''
import json, sys, warnings
warnings.simplefilter('ignore')
from dev import mkl_calls
swept = {}
for kernels in sys.argv[3:]:
    if kernels == 'portable':
        import torch
        from mmrepro.ops import portable
        torch.backends.cuda.enable_flash_sdp(False)
        portable.install()
    found = mkl_calls.sweep(sys.argv[1], int(sys.argv[2]))
    swept[kernels] = {kind: {name: sorted(texts) for name, texts in rows.items()}
                      for kind, rows in found.items()}
print(json.dumps(swept))
'''


@pytest.fixture(scope='module')
def counting(tmp_path_factory):
    """Return the variables of a process that counts the calls of MKL."""
    if shutil.which('gcc') is None or sys.platform != 'linux':
        pytest.skip('no C compiler to build the counter with')
    library = mkl_calls.build(tmp_path_factory.mktemp('counter'))
    return mkl_calls.environment(library, missing_at_start({}, num_threads=1, cpu='portable'))


def run(counting, *arguments):
    return json.loads(python(*arguments, **counting).splitlines()[-1])


@pytest.fixture(scope='module')
def swept(counting):
    """Return what the samples call, with torch's own kernels and with the portable ones."""
    return run(counting, '-c', SWEEP, NAMES, 1, 'stock', 'portable')


@pytest.mark.nightly
def test_the_table_has_every_operator_that_calls_mkl(swept):
    """The control: with torch's own kernels the same samples do call it."""
    found = swept['stock']
    called = {name.split('.')[1] for name in found['calls']}
    listed = {row.operator.partition('.')[0] for row in ROUTED} | {*REFUSED, *REFUSED_SPARSE}
    assert called - listed <= COMPOSED and not found['refused']
    assert len(called & listed) > 30


@pytest.mark.nightly
def test_no_sample_of_an_operator_calls_mkl(swept):
    found = swept['portable']
    assert found['calls'] == {}
    assert {'cholesky', 'fft.rfft', 'sparse.sampled_addmm'} <= set(found['refused'])
    assert not {'exp', 'mm', 'nn.functional.linear'} & set(found['refused'])


@pytest.mark.nightly
def test_no_sample_of_all_operators_of_torch_calls_mkl(counting):
    assert run(counting, '-c', SWEEP, '', 12, 'portable')['portable']['calls'] == {}


@pytest.mark.parametrize('config', [
    'rtmdet/rtmdet_tiny_8xb32-300e_coco.py',
    *(pytest.param(name, marks=pytest.mark.nightly) for name in (
        'faster_rcnn/faster-rcnn_r18_fpn_8xb8-amp-lsj-200e_coco.py',
        'yolox/yolox_tiny_8xb8-300e_coco.py',
        'deformable_detr/deformable-detr_r50_16xb2-50e_coco.py'))])
def test_no_step_of_a_detector_calls_mkl(counting, config):
    found = run(counting, '-m', 'dev.portable_zoo', '--serve', 'two steps', config)[1]
    assert found['calls'] == {} and len(found['losses']) == 2


CONVOLUTIONS = """
import random, sys
import torch
import torch.nn.functional as F
from mmrepro.ops import portable
if sys.argv[1] == 'portable':
    portable.install()
draw = random.Random(7)
for _ in range(400):
    groups = draw.choice((1, 1, 2, 8))
    inputs, outputs = draw.choice((2, 4, 8, 12)), draw.choice((1, 4, 8, 16))
    taps, stride, dilation, pad = (
        [draw.choice(sizes) for _ in 'hw'] for sizes in (
            (1, 2, 3, 5, 9), (1, 1, 2, 3), (1, 1, 2, 4, 8), (0, 1, 2, 4, 8)))
    size = [max(draw.choice((3, 7, 16)), step * (count - 1) + 1)
            for step, count in zip(dilation, taps)]
    F.conv2d(torch.ones(2, inputs * groups, *size), torch.ones(outputs * groups, inputs, *taps),
             None, stride, pad, dilation, groups)
"""


@pytest.mark.parametrize('kernels', ['stock', 'portable'])
def test_no_convolution_is_split_by_the_size_of_a_cache(kernels):
    """oneDNN says which kernel it runs; ``gemm:jit`` adds up blocks of input channels, as many as
    fit into a cache, and ``brgconv`` may. Without the replacement convolutions do reach the former.
    """
    said = python('-c', CONVOLUTIONS, kernels, ONEDNN_VERBOSE='1',
                  **missing_at_start({}, num_threads=1, cpu='portable'))
    ran = [line.split(',')[6] for line in said.splitlines()
           if 'exec,cpu,convolution' in line and 'forward' in line]
    whole = {'jit:avx2', 'jit_1x1:avx2', 'jit_dw:avx2', 'brgconv_1x1:avx2'}
    assert len(ran) > 40
    assert set(ran) <= whole if kernels == 'portable' else 'x64:gemm:jit' in ran
