"""Compare module by module: two models on one batch, or one model on an image alone and in a batch.

The answer is the first module whose output differs.
"""
from __future__ import annotations

import glob
import itertools
import json
import math
import os
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Callable, NamedTuple

import numpy as np
import torch
from torch.nn.modules.module import register_module_forward_hook

from .. import seeds
from ..checkpoint.files import load
from ..data.data_errors import summary, where_raised
from ..errors import DIFFERENT, DONE, ConfigError, RunError
from ..facts.collect import read_settings
from ..objects.digests import state_digest
from ..objects.walks import tensors
from ..report.compare import MAX_ROWS, relative
from ..report.report import Report, Table
from ..report.stock_runs import facts_of
from ..runs.config_files import config_of, find_config, shipped
from ..runs.launcher import LOG_TAIL
from ..runs.startup import build_runner
from ..util.text import listed, page

SCRIPT = 'tools/record_modules.py'  # imports nothing of mmrepro
TOLERANCE = 1e-5  # between environments, where kernels round differently; within one, 0
GROWTH = 10.  # rounding grows from module to module, but by no such factor in one


class ModuleRecord(NamedTuple):
    """An input or output of a module. The first four fields say which."""
    mode: str  # of the model
    module: str  # path; '' for the model
    call: int  # number of the call of the module in this mode
    end: str  # 'in' or 'out'
    kind: str  # class of the module
    samples: list[TensorValues]

    def where(self) -> str:
        return f'{self.module or "(model)"} ({self.kind}; mode {self.mode}, call {self.call})'


def compare_modules(a: str, b: str, *, checkpoint: str | None = None, python: str | None = None,
                    tolerance: float | None = None,
                    on_progress: Callable[[str], None] = lambda text: None) -> Report:
    """Give two models the same weights and batch, on the CPU, and compare the output of every
    module.

    Args:
        a, b: a config, or a work directory: its newest config, and for A its last checkpoint.
        checkpoint: file of the weights; None: those of A.
        python: interpreter of B, which needs MMEngine and the packages that B uses, not mmrepro.
        tolerance: largest relative difference that counts as rounding.
    """
    if tolerance is None:
        tolerance = TOLERANCE if python else 0.
    if checkpoint is None and os.path.isdir(a):
        checkpoint = max(glob.glob(os.path.join(glob.escape(a), '*.pth')), key=_age, default=None)
    configs = [_config(path) for path in (a, b)]
    with tempfile.TemporaryDirectory() as folder:
        files = [os.path.join(folder, name) for name in 'AB']
        job: dict[str, Any] = dict(config=configs[0], out=files[0], imports=['mmrepro'])
        if checkpoint is not None:
            if '://' in checkpoint:
                config_of(configs[0])  # imports the module that registers the file backend
            content = load(checkpoint)
            job['weights'] = os.path.join(folder, 'weights')
            torch.save(content.get('state_dict', content), job['weights'])
        on_progress(f'A: {configs[0]}, weights: {checkpoint or "initial"}')
        first = _record(sys.executable, job)
        on_progress(f'B: {configs[1]}, with {python or "the same Python"}')
        second = _record(python or sys.executable, dict(
            config=configs[1], out=files[1], given=files[0], imports=[] if python else ['mmrepro']))
    notes = [f'{name}: weights that do not fit: {listed(recording["notes"], 4)}' for name, recording
             in (('A', first), ('B', second)) if recording['notes']]
    notes += [f'{name} is {x} in A, {y} in B' for name, x in first['versions'].items()
              for y in [second['versions'].get(name)] if x != y]
    found, compared, largest = _first_difference(_events(first), _events(second), tolerance)
    tables = [_outcomes(name, first[name], second[name]) for name in ('losses', 'predictions')]
    if found is None and largest > tolerance:
        found = ('no module stands out: the difference grows from module to module, up to '
                 f'{largest:.2g}')
    agree = f'are at most {largest:.2g} apart' if largest else 'have the same values'
    verdict = f'NOTHING DIFFERS: {compared} inputs and outputs of modules {agree}'
    if found:
        verdict = f'DIFFERENT: {found}'
    return Report(f'{a} and {b}', verdict, DIFFERENT if found else DONE, tables, notes, data=dict(
        first=found, compared=compared, losses=[first['losses'], second['losses']]))


def _age(path: str) -> tuple[float, str]:
    """Order files by their time; a copy of a folder may have given all of them one."""
    return os.path.getmtime(path), path


def _config(path: str) -> str:
    files = [found for place in ('*.py', 'vis_data/config.py') for found in glob.glob(
        os.path.join(glob.escape(path), place))] if os.path.isdir(path) else [find_config(path)]
    if not files:
        raise RunError(f'{path}: has no config (*.py), which MMEngine writes when a run begins')
    path = os.path.abspath(max(files, key=_age))
    with open(path, 'rb') as file:
        if path.endswith('.py') and facts_of(read_settings(file.read()))[0]:
            raise ConfigError(f'{path}: is of MMDetection 2.x, which --trace cannot run')
    return path


def _record(python: str, job: dict[str, Any]) -> Any:
    try:
        done = subprocess.run([python, shipped(SCRIPT), json.dumps(job)], capture_output=True,
                              text=True)
    except OSError as error:
        raise ConfigError(f'--python {python}: {error.strerror}') from error
    if done.returncode:
        lines = (done.stderr.strip() or f'exit code {done.returncode}').splitlines()
        frames = [number for number, line in enumerate(lines) if line.startswith('  File "')]
        if frames:  # the message of the error, which may have several lines, is below its frames
            lines = [*itertools.dropwhile(lambda line: line.startswith(' '), lines[frames[-1]:])]
        reason = '\n'.join(lines[-LOG_TAIL:])
        if "'mmcv._ext'" in reason:
            reason += '; with mmcv-lite, install mmrepro there, which provides the operators'
        raise RunError(f'{job["config"]}: its model does not run with {python}: {reason}')
    return load(job['out'])


def _events(recording: Any) -> list[ModuleRecord]:
    return [ModuleRecord._make((*key, kind, [TensorValues(*sample) for sample in samples]))
            for key, kind, samples in recording['events']]


def _first_difference(a: Sequence[ModuleRecord], b: Sequence[ModuleRecord], tolerance: float
                      ) -> tuple[str | None, int, float]:
    """Return the first difference, and the number and largest distance of agreeing values."""
    others = {event[:4]: event for event in b}
    found = first_apart(((number, _distance(event, others.get(event[:4])))
                         for number, event in enumerate(a)), tolerance, GROWTH)
    if found.place is None:
        return None, found.before, found.largest
    event, other = a[found.place], others.get(a[found.place][:4])
    if other is None:
        text = f'{event.where()} is not called in B'
    else:
        text = f'{_place(a, found.place, other.kind)}; {_how_far(event, other)}'
    return text, found.before, found.largest


def _distance(a: ModuleRecord, b: ModuleRecord | None) -> float:
    """Return the largest distance of the tensors of two events; infinite where one has none."""
    if b is None or len(a.samples) != len(b.samples):
        return math.inf
    return max(map(distance, a.samples, b.samples), default=0.)


def _place(events: Sequence[ModuleRecord], number: int, kind_b: str) -> str:
    """Say which input or output differs first; of an input, which code it comes from."""
    event = events[number]
    if event.end == 'out':
        kinds = '' if event.kind == kind_b else f', which is {kind_b} in B,'
        return f'the output of {event.where()}{kinds} differs first, and its input agrees'
    called = {event.module for event in events}  # not those that only hold others, as lists do
    owner = event.module.rpartition('.')[0]
    while owner and owner not in called:
        owner = owner.rpartition('.')[0]
    return (f'the input of {event.where()} differs first, and all outputs before it agree: it '
            f'comes from code of {owner or "the model"} after '
            f'{events[number - 1].module or "its start"}')


def _how_far(event: ModuleRecord, other: ModuleRecord) -> str:
    """Say how far the tensors of two events are apart; of several, the farthest."""
    pairs = [*zip(event.samples, other.samples)]
    reshaped = [pair for pair in pairs if pair[0].shape != pair[1].shape]
    if reshaped:
        a, b = reshaped[0]
        return f'its shape is {list(a.shape)} in A, {list(b.shape)} in B'
    if len(event.samples) != len(other.samples):
        return f'{len(event.samples)} and {len(other.samples)} tensors'
    a, b = max(pairs, key=lambda pair: distance(*pair))
    difference = compare_tensors(a.values, b.values)
    return difference.text() if difference else f'norms {a.norm:.9g} and {b.norm:.9g}'


def _outcomes(name: str, a: dict[str, Any], b: dict[str, Any]) -> Table:
    def text(value: Any) -> str:
        if not isinstance(value, torch.Tensor):
            return '(missing)' if value is None else f'{value:.9g}'
        most = f', up to {float(value.max()):.6g}' if value.numel() else ''
        return f'{list(value.shape)}{most}'

    return Table(('', 'A', 'B'), [(key, text(a.get(key)), text(b.get(key))) for key in {**a, **b}],
                 name.capitalize(), shown=MAX_ROWS, rest='more')


ROUNDING = 8 * torch.finfo(torch.float32).eps  # of a relative difference: units in the last place


def recorded_outputs(run: Callable[[], Any], paths: Mapping[Any, str]
                     ) -> tuple[Any, list[tuple[str, torch.Tensor]]]:
    """Return the result of ``run``, and path and output of the modules in the order of calls."""
    records: list[tuple[str, torch.Tensor]] = []

    def keep(module: Any, args: Any, result: Any) -> None:
        if module in paths:  # clones, because an operator may write to an output later
            records.extend((paths[module], tensor.clone()) for tensor in tensors(result))

    with torch.no_grad(), register_module_forward_hook(keep):
        return run(), records


class ValueDifference(NamedTuple):
    """The difference of two tensors of one shape."""
    elements: int  # number of elements whose bits differ
    of: int  # number of all elements
    largest: float  # largest absolute difference; NaNs do not count
    relative: float  # the largest difference over the largest magnitude
    first: tuple[int, ...]  # index of the first element that differs
    a: float  # its values
    b: float

    def text(self) -> str:
        text = (f'{self.elements} of {self.of} elements differ, by at most {self.largest:.3g} '
                f'({self.relative:.2g} of the largest value); the first is at {list(self.first)}: '
                f'{self.a!r} / {self.b!r}')
        return text + ('; a rounding difference' if 0 < self.relative < ROUNDING else '')


def compare_tensors(a: torch.Tensor, b: torch.Tensor) -> ValueDifference | None:
    """Compare two tensors of one shape and type; None when their bytes agree."""
    if a.numel() == 0:
        return None
    shape = a.shape
    a, b = (t.clone(memory_format=torch.contiguous_format).view(-1) for t in (a, b))
    bytes_a, bytes_b = (t.view(torch.uint8).view(t.numel(), -1) for t in (a, b))
    differ = (bytes_a != bytes_b).any(1)
    if not differ.any():
        return None
    first = int(differ.nonzero()[0])
    wide = torch.complex128 if a.is_complex() else torch.float64
    distance = (a.to(wide) - b.to(wide)).abs().nan_to_num(0, 0)
    largest, scale = float(distance.max()), float(a.to(wide).abs().nan_to_num(0, 0).max())
    index = tuple(map(int, np.unravel_index(first, shape)))
    return ValueDifference(int(differ.sum()), a.numel(), largest,
                           largest / scale if scale else largest, index, a[first].item(),
                           b[first].item())


class TensorValues(NamedTuple):
    """What is kept of a tensor."""
    shape: tuple[int, ...]
    norm: float
    values: torch.Tensor  # elements, in one dimension


def values_of(tensor: torch.Tensor) -> TensorValues:
    """Return all of a tensor, as :func:`distance` compares it."""
    flat = tensor.detach().double().flatten()
    return TensorValues(tensor.shape, float(flat.norm()), flat)


def distance(a: TensorValues, b: TensorValues) -> float:
    """Return the relative distance of two samples."""
    if a.shape != b.shape:
        return math.inf
    norms, x, y = relative(a.norm, b.norm), a.values, b.values
    if not x.numel():
        return norms
    gap = torch.where((x == y) | (x.isnan() & y.isnan()), 0., (x - y).abs())
    scale = float(x.abs().nan_to_num(0, 0, 0).max()) or 1.
    return max(norms, float((gap / scale).nan_to_num(math.inf).max()))


class FirstApart(NamedTuple):
    """The first place where two models, or two runs of one, are apart by more than rounding."""
    place: Any  # None: there is none
    distance: float  # there
    before: int  # number of places that were compared before it
    largest: float  # largest distance before it


def first_apart(distances: Iterable[tuple[Any, float]], tolerance: float,
                growth: float = 0.) -> FirstApart:
    """Find the first place whose distance exceeds rounding.

    Args:
        distances: places and relative distances, in the order of execution.
        tolerance: largest distance that counts as rounding.
        growth: factor by which rounding may grow at one place, over the largest distance so far.
    """
    number, largest = 0, 0.
    for place, apart in distances:
        if apart > max(tolerance, growth * largest):
            return FirstApart(place, apart, number, largest)
        number, largest = number + 1, max(largest, apart)
    return FirstApart(None, 0., number, largest)


IOU = 0.5  # boxes that overlap by more are the same object
VISIBLE = 1e-4  # relative difference: no rounding of one operator
PADDED, IN_BATCH = 'padded as in the batch, still alone', 'with the other images, padded the same'


def alone_and_in_batch(cfg: Any, checkpoint: str, image: str, others: Sequence[str],
                       threshold: float) -> Report:
    """Predict an image alone and in a batch, without a dataset; ``threshold`` is of the scores."""
    runner, images = build_runner(cfg), [image, *others]
    runner.call_hook('before_run')
    runner.load_checkpoint(checkpoint)
    runner.model.eval()
    single, padded, batch = (padded_batch(runner.cfg, runner.model, runner.repro.root, paths)
                             for paths in ([image], images, images))
    sizes = ['x'.join(map(str, data['inputs'].shape[2:])) for data in (single, batch)]
    padded = {key: value[:1] for key, value in padded.items()}
    tables, alone = [], _predict(runner, single)
    before = alone
    steps = [(IN_BATCH, batch)]
    if sizes[0] != sizes[1]:
        steps.insert(0, (PADDED, padded))
    for change, data in steps:
        after = _predict(runner, data)
        rows = [('predictions', compare_detections(before[0], after[0], threshold)['text'])]
        tables.append(Table((), rows + _first_modules(before[1], after[1]), change))
        before = after
    difference = compare_detections(alone[0], before[0], threshold)
    if difference['same_bits']:
        code, depend, advice = DONE, 'do not depend', []
    else:
        code, depend, advice = DIFFERENT, 'depend', [
            'with --cfg-options +randomness.independent_predictions=True, mmrepro test takes one '
            f'image at a time: {page("explanation/testing.md")}']
    return Report(
        '', f'{image}: the predictions {depend} on {listed(others)} in the batch: '
        f'{difference["text"]}', code, tables,
        [f'{len(alone[0])} detections alone; height and width are padded to {sizes[0]} alone and '
         f'to {sizes[1]} in the batch'], advice,
        data=dict(difference, image=image, others=others, padded=sizes,
                  changes={table.title: table.rows for table in tables}))


def padded_batch(cfg: Any, model: Any, root: int, images: Sequence[str]) -> Any:
    """Return arguments of ``model.forward``: images after the config's test pipeline, padded."""
    from mmcv.transforms import Compose
    from mmdet.utils import get_test_pipeline_cfg
    pipeline, packed = Compose(get_test_pipeline_cfg(cfg)), []
    for path in images:
        seeds.seed_all(root, 'test', 'image')
        try:
            packed.append(pipeline(dict(img_path=path, img_id=0)))
        except Exception as error:
            raise ConfigError(f'{path} does not go through the test pipeline: {summary(error)} '
                              f'({where_raised(error)})') from error
    return model.data_preprocessor(
        {key: [sample[key] for sample in packed] for key in packed[0]}, False)


def _predict(runner: Any, data: Any) -> tuple[Any, dict[Any, torch.Tensor]]:
    """Return the detections in the first image, and what modules return, by path and number."""
    paths = {module: path for path, module in runner.model.named_modules()}
    seeds.seed_all(runner.repro.root, 'test', 'image')  # as independent_predictions has it
    samples, records = recorded_outputs(lambda: runner.model(**data, mode='predict'), paths)
    calls: defaultdict[str, Iterator[int]] = defaultdict(itertools.count)
    return samples[0].pred_instances.cpu(), {
        (path, next(calls[path])): tensor for path, tensor in records
        if tensor.is_floating_point() and tensor.dim()}


def _first_modules(a: dict[Any, torch.Tensor], b: dict[Any, torch.Tensor]) -> list[tuple[str, str]]:
    """Return the first module whose output differs, and the first by more than rounding."""
    differences = {}
    for key, output in a.items():
        # values of the first image: the first pixels of maps, the first rows
        other = b.get(key, output)[:len(output)]
        if output.dim() == 4:
            other = other[:, :, :output.shape[2], :output.shape[3]]
        difference = compare_tensors(output, other) if output.shape == other.shape else None
        if difference is not None:
            differences[key] = difference
    if not differences:
        return []
    first = next(iter(differences))
    rows = [('first module that differs', first[0]), ('its output', differences[first].text())]
    visible = first_apart(((key, difference.relative) for key, difference in differences.items()),
                          VISIBLE).place
    if visible is not None and visible != first:
        rows += [('first by more than rounding', visible[0]),
                 ('its output', differences[visible].text())]
    return rows


def compare_detections(a: Any, b: Any, threshold: float) -> dict[str, Any]:
    """Compare detections A and B: largest differences, and numbers of scores from the threshold."""
    from mmdet.structures.bbox import bbox_overlaps
    from scipy.optimize import linear_sum_assignment
    # boxes without an area overlap nothing
    near = bbox_overlaps(a.bboxes, b.bboxes).maximum((a.bboxes[:, None] == b.bboxes).all(-1))
    alike = a.labels[:, None] == b.labels
    fit = torch.where(near > IOU, near + alike, 0)
    of_a, of_b = map(torch.from_numpy, linear_sum_assignment(fit, maximize=True))
    of_a, of_b = (indices[fit[of_a, of_b] > 0] for indices in (of_a, of_b))
    shown = [detections.scores >= threshold for detections in (a, b)]
    both = shown[0][of_a] & shown[1][of_b]
    boxes, scores = (max((x[of_a] - y[of_b]).abs().flatten().tolist(), default=0.)
                     for x, y in ((a.bboxes, b.bboxes), (a.scores, b.scores)))
    vanish, appear = (int(scored.sum() - both.sum()) for scored in shown)
    relabeled = int((both & ~alike[of_a, of_b]).sum())
    same = state_digest(tensors(a)) == state_digest(tensors(b))
    text = 'same bits' if same else (
        f'boxes differ by up to {boxes:.3g} pixels, scores by up to {scores:.3g}; from a score of '
        f'{threshold:g} on, {appear} appear, {vanish} vanish, {relabeled} have another label')
    return dict(same_bits=same, boxes=boxes, scores=scores, appear=appear, vanish=vanish,
                relabeled=relabeled, threshold=threshold, text=text)
