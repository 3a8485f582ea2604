"""What was measured of two versions of a library is said of the parts of a config."""
import pytest
from mmengine.config import Config

from mmrepro.errors import ResumeError
from mmrepro.facts import compatibility, measured
from mmrepro.facts.collect import settings_of
from mmrepro.facts.compatibility import CHANGES, HARMLESS, MAY, differences
from mmrepro.facts.measured import effect

CPU = {'hardware.cpu_features': 'sse4_2 avx fma avx2'}
LOADING = dict(type='LoadImageFromFile', backend_args=None)
BOXES = dict(type='LoadAnnotations', with_bbox=True)
RESIZE = dict(type='Resize', scale=(1333, 800), keep_ratio=True)
FLIP = dict(type='mmdet.RandomFlip', prob=0.5, direction=['horizontal', 'vertical'])
PACK = dict(type='PackDetInputs', meta_keys=('img_id', 'img_path'))
DETECTION = [LOADING, BOXES, RESIZE, FLIP, PACK]


def facts(*pipeline, version='4.12.0', package='cv2', **changes):
    config = Config(dict(
        train_dataloader=dict(num_workers=2, sampler=dict(type='DefaultSampler', shuffle=True),
                              dataset=dict(type='CocoDataset', pipeline=list(pipeline))),
        model=dict(type='RetinaNet')))
    found = settings_of(config.to_dict())
    return {**found, **CPU, f'version.{package}': version, **changes}


def change(*pipeline, then='4.11.0', now='5.0.0', package='cv2', **changes):
    return effect(package, then, now, facts(*pipeline, **changes), facts(*pipeline, **changes))


@pytest.mark.parametrize('setting', [
    ['[CLS]', '[SEP]', '.'], '[MASK] token', '[1', [0, float('inf')], [float('nan')]])
def test_a_setting_that_only_begins_like_a_list_is_a_text(setting):
    """GLIP and Grounding DINO have tokens of this form."""
    assert change(*DETECTION, dict(type='Own', tokens=setting)).unknown == ('Own', )
    found = effect('numpy', '1.26.4', '2.3.5', *2 * [{
        **facts(*DETECTION), **settings_of(dict(model=dict(type='Own', tokens=setting)))}])
    assert found is not None


def test_parts_that_change_are_named_with_their_outputs():
    found = change(*DETECTION, dict(type='Rotate'), dict(type='Own'))
    assert found.changed == ('Rotate (uint8 image)', )
    assert {'Resize', 'RandomFlip', 'LoadAnnotations', 'PackDetInputs'} <= {*found.equal}
    assert found.unknown == ('Own', ) and not found.all_equal
    assert 'Rotate (uint8 image)' in found.text() and 'not measured: Own' in found.text()


@pytest.mark.parametrize('pipeline, changed', [
    # float32 images are resized in another way from 4.12 on, bytes are not
    ([dict(LOADING, to_float32=True), RESIZE], ('Resize (float32 image)', )),
    ([LOADING, RESIZE], ()),
    ([LOADING, dict(type='PhotoMetricDistortion'), RESIZE], ('Resize (float32 image)', )),
    # transforms within others
    ([LOADING, dict(type='RandomApply', transforms=[dict(type='RandomAffine')])],
     ('RandomAffine (uint8 image)', )),
    ([dict(LOADING, color_type='color_ignore_orientation')], ()),
])
def test_what_differs_follows_from_the_images_and_settings(pipeline, changed):
    assert change(*pipeline).changed == changed


@pytest.mark.parametrize('pipeline', [
    [dict(RESIZE, interpolation='unheard-of')], [dict(RESIZE, own=True)],
    [dict(FLIP, direction=['sideways'])]])
def test_other_settings_than_the_measured_ones_are_not_measured(pipeline):
    assert change(LOADING, *pipeline).unknown == (pipeline[0]['type'].rpartition('.')[2], )


@pytest.mark.parametrize('package, then, now, part, measured, not_measured', [
    ('scikit-learn', '1.5.2', '1.6.1', dict(type='PAAHead'), dict(covariance_type='diag'),
     dict(covariance_type='full')),
    ('pycocotools', '2.0.10', '2.0.11', dict(type='mmdet.CocoMetric'), dict(metric=['bbox']),
     dict(metric='proposal')),
    ('numpy', '2.2.6', '2.3.5', dict(type='VOCMetric', metric='mAP'), dict(eval_mode='area'),
     dict(eval_mode='own')),
    ('lvis', '0.5.2', '0.5.3', dict(type='LVISMetric'), dict(metric=['bbox', 'segm']),
     dict(metric=['proposal'])),
    ('cityscapesscripts', '2.2.4', '2.3.0', dict(type='CityScapesMetric'), {}, dict(type='Own'))])
def test_parts_of_models_and_evaluators_count_with_their_settings(
        package, then, now, part, measured, not_measured):
    def found(settings):
        config = dict(model=dict(type='PAA', bbox_head=dict(part, loss='own', **settings)))
        return change(LOADING, package=package, then=then, now=now,
                      **settings_of(config))

    name = part['type'].rpartition('.')[2]
    assert name in found(measured).equal and name not in found(measured).unknown
    other = found(not_measured)
    assert other is None or name in other.unknown


DETECTOR = {'config.model.type': 'RetinaNet', 'config.optim_wrapper.optimizer.type': 'AdamW',
            'config.model.bbox_head.loss_bbox.type': 'L1Loss', 'hardware.cpu': 'AMD EPYC 9555',
            'hardware.gpu': None}


def of_torch(then='2.0.1+cu117', now='2.2.2+cu121', **changes):
    return change(*DETECTION, package='torch', then=then, now=now, **{**DETECTOR, **changes})


def test_of_torch_the_detector_the_losses_and_the_optimizer_are_compared():
    found = of_torch()
    assert found.changed == ('AdamW (weights)', 'RetinaNet (gradients)')
    assert {'L1Loss', 'Resize'} <= {*found.equal} and not found.unknown
    found = of_torch(**{'config.model.type': 'Own', 'config.optim_wrapper.optimizer.type': 'SGD'})
    assert found.unknown == ('Own', ) and 'SGD' in found.equal and not found.changed
    # the builds for CPUs and for CUDA, and later releases
    for now in ('2.13.0+cu130', '2.14.1+cu130', '2.15.0+cu132'):
        assert of_torch('2.13.0+cpu', now).all_equal
    # torch computes in more places than the table has
    row, = differences(facts(*DETECTION, version='2.13.0+cpu', package='torch', **DETECTOR),
                       facts(*DETECTION, version='2.15.0+cu132', package='torch', **DETECTOR))
    assert row.severity == CHANGES and 'the same from AdamW' in row.consequence


@pytest.mark.parametrize('changes', [
    {'hardware.cpu': 'Intel(R) Xeon(R) Processor'}, {'hardware.gpu': 'H200'},
    {'randomness.numerics.cpu': 'portable'}, dict(now='2.2.2+cpu')])
def test_nothing_is_said_of_other_kernels_of_torch(changes):
    assert of_torch(**changes) is None


def test_nothing_is_said_of_versions_and_cpus_that_were_not_measured():
    assert change(*DETECTION, now='5.9.0') is None
    assert change(*DETECTION, package='imaginary') is None
    avx512 = {'hardware.cpu_features': f'{CPU["hardware.cpu_features"]} avx512f'}
    assert change(*DETECTION, **avx512) is None
    assert change(*DETECTION, **{'hardware.cpu_features': 'sse4_2'}) is None
    assert change(*DETECTION, **avx512, **{'randomness.numerics.cpu': 'avx2'}) is not None


def test_versions_whose_parts_are_all_equal_may_change_bits_and_others_do(monkeypatch):
    row, = differences(facts(*DETECTION, version='4.10.0'), facts(*DETECTION, version='4.12.0'))
    assert row.severity == MAY and 'the same from' in row.consequence
    for other in (dict(type='Rotate'), dict(type='Own')):
        row, = differences(facts(*DETECTION, other, version='4.12.0'),
                           facts(*DETECTION, other, version='5.0.0'))
        assert row.severity == CHANGES and 'measured' in row.consequence
    # NumPy computes in more places than the table has
    row, = differences(facts(*DETECTION, version='2.2.6', package='numpy'),
                       facts(*DETECTION, version='2.4.6', package='numpy'))
    assert row.severity == CHANGES
    # SOLO resizes masks in its head
    solo = {'config.model.mask_head.type': 'SOLOV2Head'}
    row, = differences(facts(*DETECTION, version='4.10.0', **solo),
                       facts(*DETECTION, version='4.12.0', **solo))
    assert row.severity == CHANGES and 'not measured: SOLOV2Head' in row.consequence


def test_a_resume_names_the_parts_that_change():
    rows = differences(facts(*DETECTION, dict(type='Rotate'), version='4.12.0'),
                       facts(*DETECTION, dict(type='Rotate'), version='5.0.0'))
    with pytest.raises(ResumeError, match=r'version.cv2: measured: other results from Rotate \(ui'):
        compatibility.check('a.pth', rows, strict=True)
    rows = differences(facts(*DETECTION, version='4.10.0'), facts(*DETECTION, version='4.12.0'))
    line, = compatibility.check('a.pth', rows, strict=True)
    assert 'version.cv2' in line and 'the same from' in line


def test_every_row_of_the_table_has_a_digest_for_each_version():
    for name, table in measured._table()['packages'].items():
        assert len({*table['versions']}) == len(table['versions']) > 1, name
        for part, row in table['parts'].items():
            assert {*row.get('avx512', {})} <= {*row['digests']}
            for text in (*row['digests'].values(), *row.get('avx512', {}).values()):
                assert len(measured.expanded(text)) == len(table['versions']), (name, part)


# ----------------------------------------------------------------- instructions


AVX512 = measured._table()['packages']['cv2']['avx512'][0]
BICUBIC = dict(RESIZE, interpolation='bicubic')


def test_each_cpu_has_the_digests_of_its_instructions(monkeypatch):
    """Between 4.13 and 4.14, bicubic images of float32 changed at AVX-512 only."""
    pipeline = [dict(LOADING, to_float32=True), BICUBIC]
    here = {'hardware.cpu_features': AVX512}
    assert change(*pipeline, then='4.13.0', now='4.14.0').equal == ('LoadImageFromFile', 'Resize')
    assert change(*pipeline, then='4.13.0', now='4.14.0', **here).changed == (
        'Resize (float32 image)', )
    pinned = {'randomness.numerics.cpu': 'avx2'}
    assert not change(*pipeline, then='4.13.0', now='4.14.0', **here, **pinned).changed
    found = effect('cv2', '5.0.0', '5.0.0', facts(*pipeline, **here), facts(*pipeline))
    assert found.changed == ('Resize (float32 image)', ), 'from one CPU to another'


def test_a_package_lists_the_cpus_that_have_its_digests_at_avx512():
    """AMD EPYC (Zen 4 and 5) and Intel Xeon (Ice Lake) have the same images."""
    intel = {'hardware.cpu': 'Intel(R) Xeon(R)',
             'hardware.cpu_features': AVX512.replace(' avx512_bf16', '')}
    assert change(*DETECTION, **intel) == change(
        *DETECTION, **{'hardware.cpu_features': AVX512, 'hardware.cpu': 'AMD EPYC'})
    here, there = (facts(*DETECTION, **features) for features in (
        intel, {'hardware.cpu_features': AVX512}))
    assert effect('cv2', '4.12.0', '4.12.0', here, there).all_equal


@pytest.mark.parametrize('pipeline, changes, named', [
    (DETECTION, {}, ''),
    ([LOADING, BICUBIC], {'version.cv2': '4.13.0'}, 'Resize (uint8 image)'),
    ([LOADING, BICUBIC], {'version.cv2': '5.0.0', 'randomness.numerics.cpu': 'avx2'}, ''),
    # what a version cannot compute is no difference
    ([LOADING, dict(type='Albu', transforms=[dict(type='Blur')])],
     {'version.albumentations': '9.9.9', 'randomness.numerics.cpu': 'avx2'}, ''),
    # which this version ignores on CPUs of Intel
    ([LOADING, BICUBIC], {'version.cv2': '4.13.0', 'randomness.numerics.cpu': 'avx2'},
     'Resize (uint8 image)'),
    # no difference at this version of OpenCV, and one at one of those that were measured
    ([LOADING, BICUBIC], {'version.cv2': '4.12.0'}, ''),
    ([LOADING, BICUBIC], {'version.cv2': '9.9.9'}, 'Resize (uint8 image)'),
    ([dict(LOADING, to_float32=True), BICUBIC], {'version.cv2': '5.0.0'}, 'Resize (float32 image)'),
])
def test_another_cpu_is_no_harmless_change_for_transforms_that_follow_its_instructions(
        pipeline, changes, named):
    then, now = ({**facts(*pipeline), 'hardware.cpu_features': features, **changes}
                 for features in (CPU['hardware.cpu_features'], AVX512))
    row, = differences(then, now)
    assert row.severity == (CHANGES if named else HARMLESS)
    assert named in row.consequence


def test_other_instructions_than_the_measured_ones_are_not_covered():
    assert change(*DETECTION, **{'hardware.cpu_features': AVX512}) is not None
    for features in (f'{AVX512} avx512_fp16', AVX512.replace(' avx512_vbmi2', '')):
        assert change(*DETECTION, **{'hardware.cpu_features': features}) is None
    for name, value in (('OPENCV_CPU_DISABLE', 'AVX2'), ('NPY_DISABLE_CPU_FEATURES', 'AVX2'),
                        ('OPENBLAS_CORETYPE', 'Prescott')):
        assert change(*DETECTION, **{f'env.{name}': value}) is None
        assert change(*DETECTION, **{f'env.{name}': value, 'randomness.numerics.cpu': 'avx2'})


def test_what_depends_on_the_kernels_of_openblas_is_not_measured_at_avx512():
    head = settings_of(dict(model=dict(bbox_head=dict(type='PAAHead', covariance_type='diag'))))
    wanted = dict(package='scikit-learn', then='1.5.2', now='1.6.1', **head)
    assert change(*DETECTION, **wanted).equal == ('PAAHead', )
    found = change(*DETECTION, **wanted, **{'hardware.cpu_features': AVX512})
    assert found is None


# ----------------------------------------------------------------- albumentations


SHIFT = dict(type='ShiftScaleRotate', shift_limit=.0625, scale_limit=.1, rotate_limit=15, p=.5)
BOX_PARAMS = dict(type='BboxParams', format='pascal_voc', min_visibility=.0,
                  label_fields=['gt_bboxes_labels', 'gt_ignore_flags'], filter_lost_elements=True)


def albu(*transforms, then='1.3.0', now='1.3.1', package='albumentations', **changes):
    part = dict(type='Albu', transforms=list(transforms), bbox_params=BOX_PARAMS,
                keymap=dict(img='image'), skip_img_without_anno=True)
    return change(*DETECTION, part, then=then, now=now, package=package, **changes)


def test_transforms_of_albumentations_are_parts_of_their_own():
    found = albu(SHIFT, dict(type='Resize', height=9, width=9))
    assert found.equal == ('Albu', 'Albu.BboxParams', 'Albu.Resize', 'Albu.ShiftScaleRotate')
    assert found.all_equal, 'MMDetection calls albumentations nowhere else'
    found = albu(SHIFT, then='1.4.4', now='2.0.8')
    assert any(name.startswith('Albu.ShiftScaleRotate (') for name in found.changed)
    # a Resize of albumentations is not that of MMDetection
    found = albu(dict(type='Resize', height=9, width=9), then='4.12.0', now='5.0.0', package='cv2')
    assert 'Albu.Resize' in found.unknown and 'Resize' in found.equal


@pytest.mark.parametrize('settings', [
    dict(interpolation=2), dict(border_mode=2), dict(own=3), dict(always_apply=True)])
def test_other_arguments_of_albumentations_are_not_measured(settings):
    found = albu(dict(SHIFT, **settings))
    assert found.unknown == ('Albu.ShiftScaleRotate', )


def test_stock_pipelines_of_albumentations_are_not_covered():
    assert albu(SHIFT, mmrepro=False) is None


# ----------------------------------------------------------------- what calls a package


@pytest.mark.parametrize('package, then, now', [
    ('albumentations', '1.3.0', '1.3.1'), ('scikit-learn', '1.5.2', '1.6.1')])
def test_a_transform_of_the_user_may_call_a_package(package, then, now):
    head = settings_of(dict(model=dict(bbox_head=dict(type='PAAHead'))))
    assert albu(dict(type='Blur'), dict(type='Own'), then=then, now=now, package=package,
                **head).unknown[-1] == 'Albu.Own'
    found = albu(then=then, now=now, package=package, **head)
    assert found.all_equal or package == 'scikit-learn'


def test_tied_scores_change_for_stock_mmdetection_only():
    """Up to NumPy 1.26, an unstable sort ordered them in another way; mmrepro sorts stably."""
    evaluator = {'config.val_evaluator.type': 'VOCMetric', 'config.val_evaluator.metric': 'mAP'}
    wanted = dict(package='numpy', then='1.26.4', now='2.0.2', **evaluator)
    assert 'VOCMetric' in change(*DETECTION, **wanted).equal
    stock, = change(*DETECTION, **wanted, mmrepro=False).changed
    assert stock == 'VOCMetric (tied scores of stock MMDetection)'
    found = change(*DETECTION, **{**wanted, 'then': '1.24.4', 'now': '1.26.4'})
    assert 'VOCMetric' in found.equal, '1.24 was measured'


def test_pycocotools_and_what_stands_in_for_it_are_compared():
    evaluator = {'config.val_evaluator.type': 'CocoMetric', 'config.val_evaluator.metric': 'bbox'}
    found = change(*DETECTION, package='pycocotools', then='2.0.11', now='faster-coco-eval 1.8.0',
                   **evaluator)
    assert found.changed == ('CocoMetric (bbox, single hits, segm, single hits)', )


def test_images_of_another_kind_than_the_measured_ones_are_not_measured():
    """Albu was measured with bytes."""
    part = dict(type='Albu', transforms=[dict(type='Blur', p=1.)])
    wanted = dict(then='1.3.0', now='1.3.1', package='albumentations')
    assert change(LOADING, part, **wanted).all_equal
    assert change(dict(LOADING, to_float32=True), part, **wanted) is None


@pytest.mark.parametrize('settings, covered', [
    (dict(features_only=True), True), (dict(), False),
    (dict(features_only=True, pretrained=True), False),
    (dict(features_only=True, model_name='own'), False)])
def test_a_backbone_of_timm_counts_with_its_model_and_weights(settings, covered):
    backbone = dict(type='mmpretrain.TIMMBackbone', **{'model_name': 'efficientnet_b1', **settings})
    found = change(*DETECTION, package='timm', then='0.9.16', now='1.0.31',
                   **settings_of(dict(model=dict(backbone=backbone))))
    assert (found is not None and found.all_equal) == covered
