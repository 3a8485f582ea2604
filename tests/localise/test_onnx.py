"""compare --onnx: the node that a change is planted in is named, and nothing where none is."""
import json
import sys
from pathlib import Path

import pytest
import torch
from command import exit_code
from initialised import initialised
from mmengine.config import Config
from mmengine.registry import MODELS, init_default_scope

SIZE = 128


class Raw(torch.nn.Module):
    """What the heads give."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, x):
        return tuple(tensor for level in self.model(x, mode='tensor') for tensor in level)


class Detections(Raw):
    """Boxes with scores, and labels, as mmdeploy exports them; a row of zeros fills the batch."""

    def forward(self, x):
        cls, box = self.model(x, mode='tensor')
        scores, labels = cls[0].sigmoid().flatten(2).transpose(1, 2)[:, :8].max(2)
        boxes = box[0][:, :4].flatten(2).transpose(1, 2)[:, :8]
        boxes = torch.cat([boxes[..., :2], boxes[..., :2] + boxes[..., 2:].exp() * 20], 2)
        return torch.cat([boxes, scores[..., None]], 2), labels


@pytest.fixture(scope='module', params=['retinanet_r50_fpn', 'rtmdet_tiny'])
def detector(request, data_root, tmp_path_factory):
    """Return the paths of a config, weights, and an exported model."""
    pytest.importorskip('onnxruntime')
    pytest.importorskip('onnx')
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
    """Change one weight of the first convolution whose name ends so; return the node's name."""
    import onnx
    from onnx import numpy_helper
    model = onnx.load(path)
    node = next(node for node in model.graph.node if node.name.endswith(owner))
    weight, = (one for one in model.graph.initializer if one.name == node.input[1])
    values = numpy_helper.to_array(weight).copy()
    values.flat[0] += 1
    weight.CopyFrom(numpy_helper.from_array(values, weight.name))
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


@pytest.mark.parametrize('owner, module', [
    ('neck/lateral_convs.1/conv/Conv', 'neck.lateral_convs.1.conv'),
    ('/cls_convs.1/conv_1/Conv', 'bbox_head.cls_convs.1.conv'),
    ('neck/top_down_blocks.0/final_conv/conv/Conv', 'neck.top_down_blocks.0.final_conv.conv'),
    ('/cls_convs.1.0/conv/Conv', 'bbox_head.cls_convs.0.0.conv'),
])
def test_the_node_with_a_planted_weight_is_named_with_its_module(
        detector, owner, module, tmp_path, capsys):
    config, weights, model = detector
    if ('rtmdet' in config) != ('top_down' in owner or '1.0' in owner):
        pytest.skip('a node of the other detector')
    name = planted(model, tmp_path / 'other.onnx', owner)
    code, said = asked(capsys, '--onnx', tmp_path / 'other.onnx', config, weights)
    assert code == 1
    assert said['first'].startswith(f'the output of node {name} (Conv), of module {module} (Conv2d')


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
    for words, reason in (((text, config, weights), 'text.onnx: cannot be compared with'),
                          ((model, config, weights, '--image', image), 'invalid dimensions'),
                          ((tmp_path / 'none.onnx', config, weights), 'no such file')):
        code, error = asked(capsys, '--onnx', *words)
        assert code == 2 and reason in error and error.count('\n') == 1, error


def test_options_of_other_comparisons_are_refused(tmp_path, capsys):
    assert asked(capsys, 'a', 'b', '--image', 'c') == (
        2, 'mmrepro compare: --image needs --onnx\n')
    assert asked(capsys, '--onnx', 'm', '--trace', 'a', 'b') == (
        2, 'mmrepro compare: --trace has no meaning with --onnx\n')


def test_missing_packages_are_named(monkeypatch, tmp_path, capsys):
    monkeypatch.setitem(sys.modules, 'onnx', None)
    file = tmp_path / 'm.onnx'
    file.touch()
    code, error = asked(capsys, '--onnx', file, 'a.py', 'b.pth')
    assert code == 2 and 'pip install onnx onnxruntime' in error and error.count('\n') == 1
