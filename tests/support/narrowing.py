"""Models of MMDetection with a quarter of their channels; all layers stay."""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mmrepro.objects.walks import dicts as nodes

__all__ = ['NARROWER', 'RESNETS', 'WIDTHS', 'listed', 'quarter']

# what is divided where a model becomes narrower
CHANNELS = ('in_channels', 'out_channels', 'feat_channels', 'embed_dims', 'feedforward_channels',
            'num_feats', 'fc_out_channels', 'conv_out_channels', 'in_channel', 'mid_channels',
            'roi_feat_size_channels')
NARROWER = 4
RESNETS = ('ResNet', 'ResNeXt', 'Res2Net', 'ResNeSt', 'DetectoRS_ResNet', 'DetectoRS_ResNeXt',
           'TridentResNet')


def quarter(model: Any) -> None:
    """Keep a quarter of the channels of a ResNet and of the layers after it."""
    _narrow_backbone(model)
    _divide({key: value for key, value in model.items()
             if key not in ('data_preprocessor', 'backbone')})


def _narrow_neck(model: Any) -> None:
    """Keep a quarter of the channels of a ResNet; the neck sets the channels after it."""
    _narrow_backbone(model)
    for node in nodes(model):
        for neck in listed(node.get('neck') or ()) if 'backbone' in node else ():
            if 'in_channels' in neck:
                neck['in_channels'] = _quotient(neck['in_channels'])
                break  # what follows reads the outputs of the first part


def _as_it_is(model: Any) -> None:
    """Keep the width of the zoo."""


# from small to large: a model gets the first with which MMDetection can train it
WIDTHS: dict[str, Callable[[Any], None]] = {
    'quarter': quarter, 'quarter backbone': _narrow_neck, 'full': _as_it_is}


def _narrow_backbone(model: Any) -> None:
    found = [node for node in nodes(model) if node.get('type') in RESNETS]
    if not found:
        raise ValueError('the model has no ResNet')
    for node in found:
        node['base_channels'] = 64 // NARROWER


def listed(value: Any) -> Any:
    return value if isinstance(value, (list, tuple)) else [value]


def _quotient(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return [_quotient(one) for one in value]
    return value // NARROWER if isinstance(value, int) and value >= NARROWER ** 2 else value


def _divide(node: Any) -> None:
    for key, value in node.items() if isinstance(node, dict) else enumerate(node):
        if key in CHANNELS:
            node[key] = _quotient(value)
        elif isinstance(value, (dict, list)):
            _divide(value)
