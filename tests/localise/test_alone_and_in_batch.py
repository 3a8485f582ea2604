"""``mmrepro test CONFIG CHECKPOINT --image A --with B``: do predictions for A depend on B?"""
import contextlib
import io
import json
import os
import re

import mmdet.datasets.transforms  # noqa: F401  registers them
import pytest
import torch
from command import exit_code
from demo_runs import initialised
from harness import Child
from mmengine.config import Config
from mmengine.structures import InstanceData

from mmrepro.cli import arguments
from mmrepro.errors import ConfigError
from mmrepro.localise.compare_modules import compare_detections, padded_batch


@pytest.fixture(scope='module')
def detector(data_root, tmp_path_factory):
    import mmdet.datasets  # noqa: F401  warm the parent
    import mmdet.models  # noqa: F401
    return initialised('faster-rcnn_r50_fpn', data_root, tmp_path_factory.mktemp('detector'))


def images_by_shape(data_root):
    """Return two upright images, which are padded to one size, and a wide one."""
    with open(os.path.join(data_root, 'annotations', 'instances_val2017.json')) as file:
        images = json.load(file)['images']
    upright = [one['width'] < one['height'] for one in images]
    paths = [os.path.join(data_root, 'val2017', one['file_name']) for one in images]
    first = upright.index(True)
    return paths[first], paths[upright.index(True, first + 1)], paths[upright.index(False)]


def asked(paths, folder, *words):
    """Ask in a process of its own; return the exit code, the outcome and the text."""
    out = folder / 'outcome.json'

    def job():
        arguments.restart_for = lambda cfg: None
        text = io.StringIO()
        with contextlib.redirect_stdout(text):
            code = exit_code('test', *paths, '--work-dir', folder / 'work', '--score-thr', 0,
                             '--json', out, *words)
        return code, text.getvalue()

    code, text = Child(job).result()
    return code, json.loads(out.read_text()), text


def test_an_image_of_the_same_shape_changes_rounding_and_the_module_is_named(
        detector, data_root, tmp_path):
    first, alike, _ = images_by_shape(data_root)
    code, said, text = asked(detector, tmp_path, '--image', first, '--with', alike)
    assert code == 1 and not said['same_bits'] and said['padded'][0] == said['padded'][1]
    (change, rows), = said['changes'].items()
    assert change == 'with the other images, padded the same'
    names = [name for name, _ in rows]
    assert names[:3] == ['predictions', 'first module that differs', 'its output']
    assert re.fullmatch(r'backbone\.layer\d\.\d\.conv\d', rows[1][1])
    assert 'a rounding difference' in rows[2][1]
    assert f'{first}: the predictions depend on {alike} in the batch: boxes differ by' in text
    assert '+randomness.independent_predictions=True, mmrepro test takes one image at a' in text


def test_padding_is_told_apart_from_the_other_images(detector, data_root, tmp_path):
    first, _, other = images_by_shape(data_root)
    code, said, text = asked(detector, tmp_path, '--image', first, '--with', other, first)
    assert code == 1 and said['padded'][0] != said['padded'][1]
    padding, batch = said['changes'].items()
    assert padding[0] == 'padded as in the batch, still alone'
    assert batch[0] == 'with the other images, padded the same'
    assert 'first by more than rounding' in dict(padding[1])
    assert said['boxes'] > 0 and 'padded as in the batch, still alone' in text


def test_an_image_that_the_batch_does_not_change_ends_with_0(data_root, tmp_path):
    """Nothing is computed for several images at once: the model predicts them one by one."""
    paths = initialised('rtmdet_tiny', data_root, tmp_path)
    options = ('--cfg-options', 'model.type=OneByOne',
               'custom_imports.imports=[mmrepro,one_by_one]')
    first, alike, _ = images_by_shape(data_root)
    code, said, _ = asked(paths, tmp_path, '--image', first, '--with', alike, alike, *options)
    assert code == 0 and said['same_bits'] and said['vanish'] == 0
    (_, rows), = said['changes'].items()
    assert rows == [['predictions', 'same bits']]


def found(*rows):
    boxes, scores, labels = zip(*rows)
    return InstanceData(bboxes=torch.tensor(boxes), scores=torch.tensor(scores),
                        labels=torch.tensor(labels))


def test_detections_are_compared_by_object_whatever_their_order():
    square, far, edge = [0., 0., 8., 8.], [50., 50., 60., 60.], [5., 5., 5., 5.]
    before = found((square, .9, 1), (far, .5, 2), (edge, .4, 0))
    counts = 'boxes', 'scores', 'appear', 'vanish', 'relabeled'

    def compared(*rows):
        result = compare_detections(before, found(*rows) if rows else before[:0], .3)
        return result['same_bits'], *(result[name] for name in counts)

    assert compared((square, .9, 1), (far, .5, 2), (edge, .4, 0)) == (True, 0, 0, 0, 0, 0)
    moved = compared((far, .5, 2), ([0., 0., 8., 9.], .75, 1), (edge, .4, 0))
    assert moved == (False, 1, pytest.approx(.15), 0, 0, 0)
    # a label; a score that falls below the threshold; a new object
    new = [90., 0., 99., 9.], .8, 1
    assert compared((square, .9, 3), (far, .2, 2), (edge, .4, 0), new)[3:] == (1, 1, 1)
    assert compared() == (False, 0, 0, 0, 3, 0)


def test_a_file_that_is_no_image_is_named(tmp_path):
    path = tmp_path / 'text.jpg'
    path.write_text('no image')
    cfg = Config(dict(test_dataloader=dict(dataset=dict(pipeline=[
        dict(type='LoadImageFromFile')]))))
    with pytest.raises(ConfigError, match='text.jpg does not go through the test pipeline: '
                                          'AssertionError: failed to load image'):
        padded_batch(cfg, None, 0, [str(path)])
