"""An exported ONNX model beside the model of its config: the first node whose output differs."""
from __future__ import annotations

import ast
import importlib
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from mmengine.registry import MODELS, init_default_scope
from mmengine.structures import InstanceData

from .. import seeds
from ..checkpoint.files import load
from ..errors import DIFFERENT, DONE, NOTHING_TO_COMPARE, MissingPackageError, RunError
from ..objects.walks import tensors
from ..report.compare import MAX_ROWS
from ..report.report import Report, Table
from ..runs.config_files import config_of
from ..util.text import listed
from .compare_modules import (
    compare_detections,
    distance,
    first_apart,
    padded_batch,
    recorded_outputs,
    values_of,
)

TOLERANCE, SCORE = 1e-3, 0.3  # relative difference; detections count from this score on
DETECTIONS = ['dets', 'labels']  # outputs of mmdeploy, configs/mmdet/_base_/base_static.py
SHAPE = 1, 3, 320, 320  # of an input whose shape the file leaves open
SCOPES = 'pkg.torch.onnx.name_scopes'  # metadata of nodes, by torch.onnx.export(dynamo=True)


def compare_onnx(path: str, config: str, checkpoint: str, *, image: str | None = None,
                 tolerance: float | None = None) -> Report:
    """Give an ONNX model and its original one input, and compare the output of every node.

    Both run on the CPU.

    Args:
        path, config, checkpoint: the exported model, and the config and checkpoint that it was
        exported from.
        image: file of the input, which goes through the test pipeline; None: random numbers.
        tolerance: largest relative difference that counts as rounding; None: 0.001.
    """
    try:
        importlib.import_module('onnx')
        importlib.import_module('onnxruntime')
    except ImportError as error:
        raise MissingPackageError('--onnx needs ONNX Runtime: pip install onnx onnxruntime (or '
                                  '"mmrepro[onnx]")') from error
    cfg, content = config_of(config), load(checkpoint)
    tolerance = TOLERANCE if tolerance is None else tolerance
    init_default_scope(cfg.get('default_scope') or 'mmengine')
    model = MODELS.build(cfg.model).eval()
    with _one_line(path, config):
        unfit = model.load_state_dict(content.get('state_dict', content), strict=False)
    run = _run(path, config, cfg, model, image)
    found, records = _record(model, run.data,
                             'predict' if {*DETECTIONS} <= {*run.outputs} else 'tensor')
    compared = _distances(run, records)
    first = _first_difference(run, compared, model, tolerance)
    rows, apart = _outcomes(run.outputs, found, tolerance)
    known = {run.owners[i] for i in compared}
    total, count = len(run.nodes), sum(owner in known for owner in run.owners)
    largest = max(compared.values(), default=0.)
    agree = f'{len(compared)} outputs of modules are at most {largest:.2g} apart'
    if first or apart:
        code = DIFFERENT
        verdict = f'DIFFERENT: {first or "outputs of the model, and of no module"}'
    elif compared:
        code, verdict = DONE, f'NOTHING DIFFERS: {agree}'
    else:
        code, verdict = NOTHING_TO_COMPARE, f'NOTHING TO COMPARE: {agree}'
    notes = [f'{count} of {total} nodes belong to {len(known)} modules, whose outputs were '
             f'compared ({len(compared)}); {total - count} could not be matched',
             f'input: {image or "random numbers"}, {list(run.data.shape)}; tolerance {tolerance:g}',
             *(f'{checkpoint}: {what}: {listed(keys)}' for what, keys in (
                 ('lacks', unfit.missing_keys), ('has also', unfit.unexpected_keys)) if keys)]
    return Report(f'{path} and {config}', verdict, code, [Table(
        ('output', 'difference'), rows, 'Outputs', shown=MAX_ROWS, rest='more')], notes, data=dict(
            first=first or None, nodes=total, matched=count, compared=len(compared),
            largest=largest, outputs=dict(rows)))


@contextmanager
def _one_line(path: str, config: str) -> Iterator[None]:
    """Convert errors of protobuf, ONNX Runtime and pipelines into a RunError of one line."""
    try:
        yield
    except Exception as error:
        reason = ' '.join(str(error).split())
        raise RunError(f'{path}: cannot be compared with {config}: {reason}') from error


class _Run(NamedTuple):
    """A run of an exported model."""
    data: torch.Tensor  # its input
    outputs: dict[str, torch.Tensor]  # by name
    nodes: list[Any]
    owners: list[str]  # for each node, the path of its module; '' where it is not known
    values: dict[int, torch.Tensor]  # number of the last node of a module -> its output


def _run(path: str, config: str, cfg: Any, model: torch.nn.Module, image: str | None) -> _Run:
    """Run the file once as it is, and once with the outputs of modules."""
    import onnx
    from onnxruntime import InferenceSession
    seeds.seed_all(0, 'test', 'image')
    cpu = dict(providers=['CPUExecutionProvider'])
    with _one_line(path, config):
        file, session = onnx.load(path), InferenceSession(path, **cpu)
        if image:
            data = padded_batch(cfg, model, 0, [image])['inputs']
        else:
            data = torch.randn([size if isinstance(size, int) else default
                                for size, default in zip(session.get_inputs()[0].shape, SHAPE)])
        names = [output.name for output in session.get_outputs()]
        given = {session.get_inputs()[0].name: data.numpy()}
        final = dict(zip(names, map(torch.from_numpy, session.run(names, given))))
    nodes = [*file.graph.node]
    owners = _owners(nodes, model)
    # of consecutive nodes of one module, the last gives its output
    ends = [i for i, owner in enumerate(owners) if owner and owners[i + 1:i + 2] != [owner]]
    wanted = [nodes[i].output[0] for i in ends]
    file.graph.output.extend(map(onnx.helper.make_empty_tensor_value_info, {*wanted} - {*names}))
    with _one_line(path, config):
        values = InferenceSession(file.SerializeToString(), **cpu).run(wanted, given)
    return _Run(data, final, nodes, owners, dict(zip(ends, map(torch.from_numpy, values))))


def _owners(nodes: Sequence[Any], model: torch.nn.Module) -> list[str]:
    """Return the path of the leaf module that each node belongs to; '' where it is not known."""
    paths = {module: path for path, module in model.named_modules()}
    leaves = {f'.{path}': paths[module] for path, module in model.named_modules(
        remove_duplicate=False) if not [*module.children()]}  # shared ones have several paths
    words, owners = {word for path in paths.values() for word in path.split('.')}, []
    for node in nodes:
        scopes = [entry.value for entry in node.metadata_props if entry.key == SCOPES]
        scope = _innermost_scope(scopes[0]) if scopes else _scope_of_name(node.name)
        parts = scope.split('.')
        while parts and parts[0] not in words:  # wrappers of the exporter
            del parts[0]
        # names lack modules of which other methods than forward are called, and count later calls
        name = ''.join(f'.{part}' for part in parts)
        fits = [{own for path, own in leaves.items() if tail and path.endswith(tail)}
                for tail in (name, re.sub(r'_\d+(?=\.|$)', '', name))]
        owners.append(next((min(own) for own in fits if len(own) == 1), ''))
    return owners


def _innermost_scope(scopes: str) -> str:
    """Return the path of the module from the list that ``torch.onnx.export(dynamo=True)`` writes.

    The last entry is the name of the operator.
    """
    names = ast.literal_eval(scopes)
    return names[-2] if len(names) > 1 else ''


def _scope_of_name(name: str) -> str:
    """Return the path of the module from a node's name: ``/stem/stem.0/Conv`` is of ``stem.0``."""
    scope: list[str] = []
    for part in name.split('/')[1:-1]:
        if scope and part.startswith(f'{scope[-1].rpartition(".")[2]}.'):
            scope.pop()  # the part repeats the end of its container
        scope.append(part)
    return '.'.join(scope)


def _record(model: torch.nn.Module, data: torch.Tensor, mode: str) -> tuple[Any, list[Any]]:
    """Return the output of the model, and path and output of its modules in the order of calls."""
    from mmdet.structures import DetDataSample
    paths = {module: path for path, module in model.named_modules() if not [*module.children()]}
    size = dict.fromkeys(('img_shape', 'ori_shape', 'batch_input_shape', 'pad_shape'),
                         tuple(data.shape[2:]))
    samples = [DetDataSample(metainfo=dict(size, scale_factor=(1., 1.))) for _ in data]
    return recorded_outputs(lambda: model(data, samples, mode=mode), paths)


def _distances(run: _Run, records: Sequence[Any]) -> dict[int, float]:
    """Return how far the outputs of nodes are from those of their modules, by number of the node.
    """
    distances = {}
    for i, value in run.values.items():
        # or the next module's: exporters fold a BatchNorm into the convolution before it
        near = [_apart(output, value) for k, (name, _) in enumerate(records)
                if name == run.owners[i] for _, output in records[k:k + 2]
                if output.shape == value.shape]
        if near:
            distances[i] = min(near)
    return distances


def _first_difference(run: _Run, distances: Mapping[int, float], model: torch.nn.Module,
                      tolerance: float) -> str:
    """Return which node differs first from its module; '' for none."""
    found = first_apart(distances.items(), tolerance)
    if found.place is None:
        return ''
    node, owner = run.nodes[found.place], run.owners[found.place]
    before = max((i for i in distances if i < found.place), default=0)
    others = sorted({run.nodes[k].op_type for k in range(before, found.place)
                     if not run.owners[k]} - {'Constant', 'Identity'})
    text = (f'the output of node {node.name} ({node.op_type}), of module {owner} '
            f'({type(model.get_submodule(owner)).__name__}), differs first, by '
            f'{found.distance:.2g} of the largest value')
    return text + (f'; or {listed(others)} of no module before it' if others else '')


def _outcomes(final: dict[str, torch.Tensor], found: Any, tolerance: float
              ) -> tuple[list[tuple[str, str]], bool]:
    """Return a row for each output of the exported model, and whether one differs."""
    if {*DETECTIONS} <= {*final}:
        rows: list[tuple[str, str]] = []
        apart = False
        for dets, labels, sample in zip(*map(final.__getitem__, DETECTIONS), found):
            own, kept = sample.pred_instances, dets[:, 4] > 0  # the others fill the batch
            a, b = (InstanceData(bboxes=boxes, scores=scores, labels=kinds)
                    for boxes, scores, kinds in ((own.bboxes, own.scores, own.labels), (
                        dets[kept, :4], dets[kept, 4], labels[kept])))
            far = compare_detections(a, b, SCORE)
            rows.append((f'image {len(rows)}', f'{len(a)} and {len(b)} detections; {far["text"]}'))
            scale = max(a.bboxes.abs().flatten().tolist(), default=0.) or 1.
            apart |= max(far['boxes'] / scale, far['scores']) > tolerance or any(
                far[key] for key in ('appear', 'vanish', 'relabeled'))
        return rows, apart
    own = [*tensors(found)]
    if [value.shape for value in own] != [value.shape for value in final.values()]:
        return [(name, 'not compared: the heads give other shapes') for name in final], False
    gaps = [*map(_apart, own, final.values())]
    return [(name, f'{gap:.2g} of the largest value') for name, gap in zip(final, gaps)], (
        max(gaps) > tolerance)


def _apart(a: torch.Tensor, b: torch.Tensor) -> float:
    """Return the relative distance of two tensors."""
    return distance(values_of(a), values_of(b))
