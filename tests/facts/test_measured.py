"""What was measured of two versions of a library is said of the parts of a config."""
import pytest
from mmengine.config import Config

from mmrepro.errors import ResumeError
from mmrepro.facts import compatibility, measured
from mmrepro.facts.collect import settings_of
from mmrepro.facts.compatibility import CHANGES, MAY, differences
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
     dict())])
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
            for text in row['digests'].values():
                assert len(measured.expanded(text)) == len(table['versions']), (name, part)
