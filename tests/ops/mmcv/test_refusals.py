"""Arguments that do not fit are refused with a RuntimeError that names them and their shapes."""
import pytest
import torch
from mmcv.ops import (
    deform_conv2d,
    deform_roi_pool,
    roi_align,
    roi_align_rotated,
    roi_pool,
    rotated_feature_align,
    soft_nms,
)

from mmrepro.ops.operator_table import implementation

pytestmark = pytest.mark.usefixtures('torch_operators')


def zeros(*shape, dtype=torch.float32):
    return torch.zeros(shape, dtype=dtype)


NONE = zeros(0)
THREE, FOUR = zeros(3), zeros(4)
FEATURE = zeros(2, 8, 11, 13)
ROI, OTHER_IMAGE = torch.tensor([[0., 0, 0, 4, 4]]), torch.tensor([[2., 0, 0, 4, 4]])
MASKS = zeros(1, 9, 4, 4)
FIVE = zeros(3, 5)
BATCH = zeros(2, 3, 5)
PIXELS = torch.tensor([0, 1])
PAGE, LETTERS = zeros(5, 6, dtype=torch.uint8), zeros(5, 6, dtype=torch.int32)
LETTERS[1, 1] = 3
EDGES = torch.tensor([0., 0, 0, 2, 2, 2])


def conv(**changed):
    fits = dict(input=zeros(1, 2, 4, 4), weight=zeros(2, 2, 3, 3), offset=zeros(1, 18, 4, 4),
                mask=MASKS, stride_h=1)
    implementation('modulated_deform_conv_forward')(
        **{**fits, **changed}, bias=NONE, ones=NONE, output=zeros(1, 2, 4, 4), columns=NONE,
        kernel_h=3, kernel_w=3, stride_w=1, pad_h=1, pad_w=1, dilation_h=1, dilation_w=1, group=1,
        deformable_group=1, with_bias=False)


def attention(value=None, weights=None, step=64):
    implementation('ms_deform_attn_forward')(
        zeros(2, 27, 3, 4) if value is None else value, torch.tensor([[5, 4], [3, 2], [1, 1]]),
        torch.tensor([0, 20, 26]), zeros(2, 5, 3, 3, 2, 2),
        zeros(2, 5, 3, 3, 2) if weights is None else weights, step)


def carafe(kernel, groups, masks):
    feature = zeros(1, 4, 2, 2)
    implementation('carafe_forward')(feature, masks, feature.clone(), feature, feature,
                                     zeros(1, 4, 4, 4), kernel, groups, 2)


LABELS = zeros(3, dtype=torch.int64)


def focal(target=LABELS, weight=NONE, output=None):
    implementation('sigmoid_focal_loss_forward')(
        zeros(3, 4), target, weight, zeros(3, 4) if output is None else output, 2., 0.25)


# The operator, its arguments, and what the message says.
REFUSED = [
    *((pool, (FEATURE, *boxes, 2), words) for pool in (roi_align, roi_pool) for boxes, words in (
        ((ROI.double(),), r'rois must be float32, got \(1, 5\) float64'),
        ((OTHER_IMAGE,), 'images 2 to 2.*images 0 to 1'))),
    *((pool, (feature, ROI, 2), words) for pool in (roi_align, roi_pool) for feature, words in (
        (FEATURE[:0], 'images 0 to 0.*no images'), (FEATURE[0], r'input must have shape'),
        (FEATURE[:, :, :0], r'1 rois on input \(2, 8, 0, 13\).*has no pixels'))),
    (roi_align, (FEATURE, torch.tensor([[0, 0, 0, 1e9, 1e9]]), 2), 'larger than any image'),
    (roi_align, (FEATURE.int(), ROI.int(), 2), 'input must be float32'),
    (deform_roi_pool, (FEATURE, ROI, zeros(1, 1, 3, 2), (3, 2)),
     r'offset must have shape \(1, 2, 3, 2\)'),
    (conv, dict(offset=zeros(1, 16, 4, 4)), r'offset must have shape \(1, 18, 4, 4\)'),
    (conv, dict(offset=zeros(1, 18, 4, 3)), r'offset must have shape .*got \(1, 18, 4, 3\)'),
    (conv, dict(mask=MASKS.double()), 'mask must be float32'),
    (conv, dict(weight=zeros(2, 3, 3, 3)), r'weight must have shape \(N, 2, 3, 3\)'),
    (conv, dict(input=zeros(1, 2, 0, 2)), 'is smaller than the kernel'),
    (conv, dict(stride_h=0), 'stride must be positive'),
    (deform_conv2d, (zeros(1, 2, 2, 2), zeros(1, 18, 2, 2), zeros(3, 2, 3, 3), 1, 1),
     r'\(1, 2, 2, 2\).*smaller than the kernel \(3, 3\)'),
    ('deform_conv_forward', (zeros(3, 1, 1, 1), zeros(1, 1, 1, 1), zeros(3, 2, 1, 1),
                             zeros(3, 1, 1, 1), NONE, NONE, 1, 1, 1, 1, 0, 0, 1, 1, 1, 1, 2),
     'batch 3 is not divisible by im2col_step 2'),
    (attention, dict(value=zeros(2, 26, 3, 4)), r'1 x 1 that starts at key 26 .*\(2, 26, 3, 4\)'),
    (attention, dict(value=zeros(2, 27, 2, 4)), r'sampling_locations must have shape \(2, N, 2, 3'),
    (attention, dict(weights=zeros(2, 5, 3, 3, 1)), r'attention_weights .*\(2, 5, 3, 3, 1\)'),
    (attention, dict(weights=zeros(2, 5, 3, 3, 2).double()), 'attention_weights must be float32'),
    (attention, dict(step=0), 'batch 2 is not divisible by im2col_step 0'),
    (carafe, (2, 1, zeros(1, 4, 4, 4)), 'kernel_size must be odd, got 2'),
    (carafe, (3, 3, zeros(1, 27, 4, 4)), '4 channels are not divisible by group_size 3'),
    (carafe, (3, 1, zeros(1, 9, 4, 5)), r'shape \(1, 9, 4, 4\), got \(1, 9, 4, 5\)'),
    (focal, dict(target=LABELS[:2]), r'target.*\(3\).*\(2,\)'),
    (focal, dict(target=LABELS.int()), r'target must be int64.*int32'),
    (focal, dict(weight=THREE), r'\(3,\).*\(3, 4\)'),
    (focal, dict(output=zeros(2)), r'\(2,\)'),
    (focal, dict(target=LABELS + 5), r'smaller or equal than \d.*got 5 to 5'),
    (focal, dict(target=LABELS + 4, weight=FOUR), 'smaller or equal than 3.*got 4'),
    ('sync_bn_forward_mean', (BATCH[0], THREE), r'\(N, N, N\).*\(3, 5\)'),
    ('sync_bn_forward_mean', (BATCH, FOUR), r'mean.*\(2, 3, 5\).*\(4,\)'),
    ('sync_bn_forward_mean', (BATCH.long(), THREE), 'int64'),
    ('sync_bn_forward_var', (BATCH, THREE, FOUR), r'var.*\(4,\)'),
    ('sync_bn_backward_param', (BATCH, BATCH[:1], THREE, THREE), r'\(1, 3, 5\)'),
    ('sync_bn_backward_data', (BATCH, FOUR, THREE, THREE, BATCH, THREE, BATCH), r'weight.*\(4,\)'),
    ('sync_bn_forward_output', (BATCH, *[THREE] * 6, BATCH, THREE, BATCH[:1], 0., 0.1, 1),
     r'output.*\(1, 3, 5\)'),
    ('masked_im2col_forward', (zeros(1, 2, 4, 4), PIXELS, PIXELS, zeros(17, 2), 3, 3, 1, 1),
     r'col.*\(18, 2\).*\(17, 2\)'),
    ('masked_im2col_forward', (zeros(2, 2, 4, 4), PIXELS, PIXELS, zeros(18, 2), 3, 3, 1, 1),
     r'\(1, N, N, N\).*\(2, 2, 4, 4\)'),
    *(('masked_col2im_forward', (zeros(2, 2), rows, columns, zeros(1, 2, 4, 4), 4, 4, 2), words)
      for rows, columns, words in ((PIXELS, PIXELS[:1], r'\(2,\).*\(1,\)'),
                                   (PIXELS.int(), PIXELS, 'int64.*int32'),
                                   (PIXELS * 9, PIXELS, r'\(0, 0\) to \(9, 1\).*\(4, 4\)'),
                                   (PIXELS - 1, PIXELS, r'\(-1, 0\) to \(0, 1\).*\(4, 4\)'))),
    *(('nms', (boxes, scores, 0.5, 0), words) for boxes, scores, words in (
        (zeros(3, 4).double(), THREE, r'float32.*\(3, 4\) float64'),
        (zeros(3, 4).half(), THREE, r'float32.*\(3, 4\) float16'),
        (FIVE, THREE, r'\(N, 4\).*\(3, 5\)'), (zeros(3, 4), zeros(2), r'\(3, 4\).*\(2,\)'))),
    ('softnms', (zeros(3, 4), THREE, zeros(2, 5), 0.3, 0.5, 0.1, 1, 0),
     r'dets.*\(3, 5\).*\(2, 5\)'),
    (soft_nms, (zeros(3, 4).double(), THREE.double()), 'float32.*float64'),
    ('nms_match', (zeros(2, 4), 0.5), r'\(N, 5\).*\(2, 4\)'),
    (roi_align_rotated, (FEATURE, ROI, 2, 1.), r'rois must have shape \(N, 6\), got \(1, 5\)'),
    (rotated_feature_align, (FEATURE, zeros(2, 3, 3, 5)), r'shape \(2, 11, 13, 5\)'),
    ('rotated_feature_align_forward', (FEATURE, zeros(2, 11, 13, 5), FEATURE, 1., 4),
     'points must be 1 or 5, got 4'),
    ('bezier_align_forward', (FEATURE, zeros(1, 17).double(), NONE, 2, 2, 1., 2, True),
     'rois must be float32'),
    ('active_rotated_filter_forward', (zeros(2, 3, 8, 3, 3), zeros(4, 3, 3, 8).int(), BATCH),
     r'shapes do not match.*\(2, 3, 8, 3, 3\).*\(4, 3, 3, 8\)'),
    ('box_iou_rotated', (FIVE, FIVE, zeros(8), 0, False), r'\(8,\).*does not hold 3 x 3'),
    ('box_iou_quadri', (FIVE, FIVE, zeros(9), 0, False), r'boxes1 must have shape \(N, 8\)'),
    ('bbox_overlaps', (zeros(3, 4), zeros(2, 4), THREE, 0, True, 0), r'pairs.*\(3, 4\).*\(2, 4\)'),
    ('nms_rotated', (zeros(3, 7), THREE, NONE, NONE, NONE, 0.5, 0), r'\(N, 5\).*\(3, 7\)'),
    ('nms_quadri', (zeros(3, 8), THREE.double(), NONE, NONE, 0.5, 0), 'one score per box'),
    *(('contour_expand', (masks, labels, 0, most), words) for masks, labels, most, words in (
        (PAGE[None], LETTERS, 1, 'from 0 to kernel_num, 1; got 0 to 3'),
        (PAGE[None], LETTERS.long(), 3, r'internal_kernel_label must be int32.*\(5, 6\) int64'),
        (PAGE, LETTERS, 3, 'shapes do not match'))),
    ('pixel_group', (PAGE.float(), PAGE.bool(), zeros(5, 6, 3), LETTERS, PAGE, 2, 0.5),
     'labels must be below kernel_region_label, 2; got 3'),
    ('pixel_group', (PAGE.float(), PAGE[:4].bool(), zeros(5, 6, 3), LETTERS, PAGE, 4, 0.5),
     r'mask must have shape \(5, 6\), got \(4, 6\)'),
    ('psamask_forward', (zeros(1, 8, 4, 4), zeros(1, 16, 4, 4), 0, 1, 4, 4, 3, 3, 1, 1),
     r'the masks must have shape \(1, 9, 4, 4\)'),
    ('psamask_forward', (MASKS, zeros(1, 16, 4, 4), 2, 1, 4, 4, 3, 3, 1, 1),
     r'psa_type must be 0 \(collect\) or 1 .*got 2'),
    ('dynamic_voxelize_forward', (FIVE, THREE, zeros(6), zeros(3, 3).int()),
     'voxel_size must be positive'),
    ('dynamic_voxelize_forward', (FIVE, THREE + 1, zeros(6), zeros(3, 3).int()), 'holds no voxel'),
    ('hard_voxelize_forward', (FIVE, THREE + 1, EDGES, zeros(2, 4, 5), zeros(2, 3).int(),
                               zeros(2).int(), zeros(), 4, 3), 'do not hold max_voxels 3'),
    ('points_in_boxes_cpu_forward', (zeros(2, 7), FIVE, zeros(2, 3).int()),
     r'points must have shape \(N, 3\)'),
]


@pytest.mark.parametrize('operator, arguments, words', [
    pytest.param(*row, id=f'{getattr(row[0], "__name__", row[0])}, {row[2]}') for row in REFUSED])
def test_what_does_not_fit_is_refused_with_its_shape(operator, arguments, words):
    call = implementation(operator) if isinstance(operator, str) else operator
    with pytest.raises(RuntimeError, match=words):
        call(**arguments) if isinstance(arguments, dict) else call(*arguments)
