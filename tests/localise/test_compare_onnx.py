"""compare --onnx: the node that a change is planted in is named, and nothing where none is."""
import json
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from command import exit_code
from demo_runs import initialised
from mmdet.structures import DetDataSample
from mmengine.config import Config
from mmengine.registry import MODELS, init_default_scope
from mmengine.structures import InstanceData

from mmrepro import seeds
from mmrepro.localise import compare_onnx

SIZE = 128


class Raw(torch.nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, x):
        return tuple(tensor for level in self.model(x, mode='tensor') for tensor in level)


class Detections(torch.nn.Module):
    """What the model finds in the input of the comparison, as mmdeploy's models give it."""

    def __init__(self, model, change=lambda dets, labels: None):
        super().__init__()
        self.model = model
        seeds.seed_all(0, 'test', 'image')
        size = (SIZE, SIZE)
        sample = DetDataSample(metainfo=dict(img_shape=size, ori_shape=size, scale_factor=(1., 1.),
                                             batch_input_shape=size, pad_shape=size))
        with torch.no_grad():
            found = model(torch.randn(1, 3, *size), [sample], mode='predict')[0].pred_instances
        dets = torch.cat([found.bboxes, found.scores[:, None]], 1)[None]
        labels = found.labels[None].clone()
        change(dets, labels)
        # a row of zeros fills the batch
        self.dets = torch.cat([dets, torch.zeros(1, 1, 5)], 1)
        self.labels = torch.cat([labels, torch.zeros(1, 1, dtype=torch.long)], 1)

    def forward(self, x):
        given = sum(tensor.sum() for level in self.model(x, mode='tensor') for tensor in level)
        return self.dets + given.isnan(), self.labels + given.isnan()


RTMDET, RETINANET = 'rtmdet_tiny', 'retinanet_r50_fpn'


@pytest.fixture(scope='module', params=[RTMDET, RETINANET])
def detector(request, data_root, tmp_path_factory):
    folder = tmp_path_factory.mktemp('detector')
    config, weights = initialised(request.param, data_root, folder)
    export(config, weights, folder / 'model.onnx', Raw)
    return config, weights, str(folder / 'model.onnx')


def export(config, weights, path, wrapper, **kwargs):
    init_default_scope('mmdet')
    model = MODELS.build(Config.fromfile(config).model).eval()
    model.load_state_dict(torch.load(weights)['state_dict'])
    torch.onnx.export(wrapper(model).eval(), (torch.zeros(1, 3, SIZE, SIZE), ), str(path),
                      dynamo=False, opset_version=17, **kwargs)


def planted(path, out, owner):
    """Change a weight of the first convolution whose name ends so; return the node's name."""
    import onnx
    from onnx import numpy_helper
    model = onnx.load(path)
    node = next(node for node in model.graph.node if node.name.endswith(owner))
    made = {output: one.input[0] for one in model.graph.node for output in one.output
            if one.op_type == 'Identity'}  # of weights that modules share
    shared = made.get(node.input[1], node.input[1])
    weight, = (one for one in model.graph.initializer if one.name == shared)
    values = numpy_helper.to_array(weight).copy()
    values.flat[0] += 1
    model.graph.initializer.append(numpy_helper.from_array(values, 'planted'))
    node.input[1] = 'planted'
    onnx.save(model, out)
    return node.name


def asked(capsys, *words):
    code = exit_code('compare', *map(str, words), '--json')
    captured = capsys.readouterr()
    return code, json.loads(captured.out) if captured.out.startswith('{') else captured.err


def test_nothing_differs_between_a_model_and_what_was_exported_from_it(detector, capsys):
    config, weights, model = detector
    code, said = asked(capsys, '--onnx', model, config, weights)
    assert code == 0 and said['first'] is None
    assert said['compared'] > 50 and 0 < said['largest'] < 1e-5
    assert said['compared'] <= said['matched'] <= said['nodes']
    assert all(text.endswith('of the largest value') for text in said['outputs'].values())
    count = f'{said["matched"]} of {said["nodes"]} nodes belong to '
    assert said['notes'][0].startswith(count)
    assert f'; {said["nodes"] - said["matched"]} could not be matched' in said['notes'][0]


@pytest.mark.parametrize('detector, owner, module', [
    (RETINANET, 'neck/lateral_convs.1/conv/Conv', 'neck.lateral_convs.1.conv'),
    (RETINANET, '/cls_convs.1/conv_1/Conv', 'bbox_head.cls_convs.1.conv'),
    (RTMDET, 'neck/top_down_blocks.0/final_conv/conv/Conv',
     'neck.top_down_blocks.0.final_conv.conv'),
    (RTMDET, '/cls_convs.1.0/conv/Conv', 'bbox_head.cls_convs.0.0.conv'),
], indirect=['detector'])
def test_the_node_with_a_planted_weight_is_named_with_its_module(
        detector, owner, module, tmp_path, capsys):
    config, weights, model = detector
    name = planted(model, tmp_path / 'other.onnx', owner)
    code, said = asked(capsys, '--onnx', tmp_path / 'other.onnx', config, weights)
    assert code == 1
    assert said['first'].startswith(f'the output of node {name} (Conv), of module {module} (Conv2d')


@pytest.mark.parametrize('detector', [RETINANET], indirect=True)
@pytest.mark.parametrize('change, code, text', [
    (lambda dets, labels: None, 0, 'same bits'),
    (lambda dets, labels: dets[0, 0, 4].zero_(), 1, '0 appear, 1 vanish, 0 have another label'),
    (lambda dets, labels: labels[0, 0].add_(1).remainder_(6), 1,
     '0 appear, 0 vanish, 1 have another label'),
    (lambda dets, labels: dets[0, 0, 0].add_(1), 1,
     'boxes differ by up to 1 pixels, scores by up to 0'),
])
def test_detections_are_compared_as_boxes_scores_and_labels(
        detector, change, code, text, tmp_path, capsys, monkeypatch):
    config, weights, _ = detector
    monkeypatch.setattr(compare_onnx, 'SCORE', 0.)  # weights that have not been trained find little
    export(config, weights, tmp_path / 'model.onnx', partial(Detections, change=change),
           output_names=['dets', 'labels'])
    got, said = asked(capsys, '--onnx', tmp_path / 'model.onnx', config, weights)
    assert (got, [*said['outputs']]) == (code, ['image 0']) and said['first'] is None
    assert text in said['outputs']['image 0']


def test_scopes_in_the_metadata_count_where_names_say_nothing(detector, tmp_path, capsys):
    import onnx
    config, weights, path = detector
    model = onnx.load(path)
    nodes = [node for node in model.graph.node if '/neck/' in node.name]
    for number, node in enumerate(model.graph.node):
        *scope, name = node.name.replace('/model/', '').split('/')
        if node in nodes:
            entry = node.metadata_props.add()  # as torch.onnx.export(dynamo=True) writes it
            entry.key = compare_onnx.SCOPES
            entry.value = str(['', 'model.' + '.'.join(scope), name])
        node.name = f'node_{number}'
    onnx.save(model, tmp_path / 'other.onnx')
    code, said = asked(capsys, '--onnx', tmp_path / 'other.onnx', config, weights)
    assert code == 0 and 5 < said['matched'] <= len(nodes)


def test_nothing_to_compare_is_no_agreement(detector, tmp_path, capsys):
    import onnx
    config, weights, path = detector
    model = onnx.load(path)
    for node in model.graph.node:
        node.name = ''
    onnx.save(model, tmp_path / 'other.onnx')
    code, said = asked(capsys, '--onnx', tmp_path / 'other.onnx', config, weights)
    assert code == 3 and said['compared'] == 0 and said['verdict'].startswith('NOTHING TO COMPARE')


def test_a_wider_tolerance_accepts_a_difference(detector, tmp_path, capsys):
    config, weights, model = detector
    planted(model, tmp_path / 'other.onnx', 'Conv')
    words = '--onnx', tmp_path / 'other.onnx', config, weights
    assert asked(capsys, *words)[0] == 1
    assert asked(capsys, *words, '--tolerance', '1e9')[0] == 0


def test_what_cannot_be_compared_is_an_error_in_a_line(detector, data_root, tmp_path, capsys):
    config, weights, model = detector
    text = tmp_path / 'text.onnx'
    text.write_text('no model')
    image = next(Path(data_root, 'val2017').iterdir())
    cases = [((text, config, weights), 'text.onnx: cannot be compared with'),
             ((tmp_path / 'none.onnx', config, weights), 'no such file')]
    if 'rtmdet' in config:  # its pipeline pads to the shape of the exported model
        code, said = asked(capsys, '--onnx', model, config, weights, '--image', image)
        assert code == 0 and f'input: {image}, [1, 3, {SIZE}, {SIZE}]' in said['notes'][1]
    else:
        cases.append(((model, config, weights, '--image', image), 'invalid dimensions'))
    for words, reason in cases:
        code, error = asked(capsys, '--onnx', *words)
        assert code == 2 and reason in error and error.count('\n') == 1, error


def test_missing_packages_are_named(monkeypatch, tmp_path, capsys):
    monkeypatch.setitem(sys.modules, 'onnx', None)
    file = tmp_path / 'm.onnx'
    file.touch()
    code, error = asked(capsys, '--onnx', file, 'a.py', 'b.pth')
    assert code == 2 and 'pip install onnx onnxruntime' in error and error.count('\n') == 1


def test_boxes_without_an_extent_are_compared():
    """A head may find boxes at the origin only."""
    labels = torch.zeros(1, dtype=torch.long)
    found = DetDataSample(pred_instances=InstanceData(
        bboxes=torch.zeros(1, 4), scores=torch.tensor([.9]), labels=labels))
    dets = torch.tensor([[[0., 0., 0., 0., .9]]])
    final = dict(dets=dets, labels=labels[None])
    rows, apart = compare_onnx._outcomes(final, [found], 1e-3)
    assert not apart and '1 and 1 detections' in rows[0][1]
    final['dets'] = dets + torch.tensor([0., 0., 4., 4., 0.])
    assert compare_onnx._outcomes(final, [found], 1e-3)[1]
