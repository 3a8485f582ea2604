"""Compare two runs: settings and environment, where they diverge, how the difference grows."""
from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from ..checkpoint.files import load
from ..errors import CheckpointError
from ..facts.compatibility import (
    ATTACHED,
    CHANGES,
    HISTORY,
    WEIGHTS,
    FactDifference,
    differences,
    doubts,
)
from ..facts.own_code import MMREPRO, PREFIX
from ..fingerprint.divergence import (
    ComparedField,
    Divergence,
    compare_steps,
    divergences,
    first_differing_metric,
    not_compared,
)
from ..fingerprint.manifest import Manifest, compare_manifests
from ..fingerprint.reader import RankLog
from ..fingerprint.schema import BY_NAME, meaning, value_of
from ..objects.digests import state_digest
from ..util.files import checked
from ..util.text import counted, listed
from .run_view import RunView, load_run
from .stock_runs import DECIMALS, NEVER, across_dialects, unknown

LOGGED = 'scalars'  # prefix of fields that MMEngine logged
# facts that a manifest, checkpoints and logs name in the same way; if one run has them only, too
SETTINGS = ('config.', 'randomness.', PREFIX, ATTACHED, HISTORY)
# keys of `randomness` that stock MMEngine has as well
STOCK_RANDOMNESS = tuple(f'randomness.{key}' for key in ('seed', 'deterministic', 'diff_rank_seed'))
# facts of a manifest about the moment at which a process begins
OF_THE_START = ('initial_weights', 'weights', 'iteration', 'resumed_from')
# COCO's value of a metric of objects that there are none of, such as large ones
NOT_COUNTED = -1.


class Column(NamedTuple):
    """A number at all steps at which both runs have it."""
    steps: list[int]
    a: list[float]
    b: list[float]


class Norms(NamedTuple):
    """Relative differences of the norms of parameters; 0 where the bits agree."""
    iterations: list[int]
    parameters: list[str]
    rows: list[list[float]]  # one per iteration, with a value per parameter


@dataclass
class Comparison:
    """All that the reports show."""
    a: RunView
    b: RunView
    exact: bool  # bits were compared (fingerprints); otherwise the logs of MMEngine
    common: list[int]  # iterations that both have
    only: tuple[list[int], list[int]]  # iterations of A that B lacks, of B that A lacks
    first: Divergence | None = None
    fields: list[ComparedField] = field(default_factory=list)  # of the first iteration that differs
    differing: int = 0  # number of common iterations that differ
    # the first metric of a validation that differs, of fingerprints
    metric: Divergence | None = None
    manifest: list[FactDifference] = field(default_factory=list)
    losses: dict[str, Column] = field(default_factory=dict)
    vals: dict[str, Column] = field(default_factory=dict)  # metrics
    # metrics that one run has alone, A in front: the last step, and the value there
    lone_vals: tuple[dict[str, tuple[int, float]], ...] = ({}, {})
    # parameter -> first iteration after which its bits differ, None: never; in the order of the
    # model. Empty below level 'parameter'.
    diverged: dict[str, int | None] = field(default_factory=dict)
    norms: Norms = Norms([], [], [])
    # distances between the checkpoints that both runs wrote
    weights: list[Distance] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def equal(self) -> bool:
        """Whether both runs have common records, and none of them differs."""
        return bool(self.common) and self.first is None and self.metric is None and not any(
            row.distance is not None and not row.same for row in self.weights)

    def suspects(self) -> list[str]:
        """Return differences that may have changed bits, where none is known to change them."""
        if self.equal or any(row.severity == CHANGES for row in self.manifest):
            return []
        return doubts(self.manifest)

    def verdict(self) -> str:
        verdict, suspects = self._verdict(), self.suspects()
        if not self.common or not suspects:
            return verdict
        return f'{verdict}\nwhat else differs, and may be the cause: {listed(suspects, 6)}'

    def _verdict(self) -> str:
        if not self.common:
            return 'NOTHING TO COMPARE: the runs have no iteration in common'
        span = f'{counted(len(self.common), "iteration")}, {self.common[0]} to {self.common[-1]}'
        if self.first is not None:
            return f'DIFFERENT: {_sentence(self.first)}'
        if self.metric is not None:
            text = self.metric.text()  # steps of MMEngine's log may be epochs
            return (f'DIFFERENT: {text if self.exact else text.replace("iteration", "step", 1)}, '
                    f'although {span} do not')
        if not self.equal:
            return f'DIFFERENT: checkpoints differ, although {span} do not'
        if self.exact:
            return f'SAME BITS: {span}'
        return (f'SAME LOGS: {span} as MMEngine logged them; {self._checkpoints()}bits were not '
                'recorded (mmrepro train --fingerprint records them)')

    def _checkpoints(self) -> str:
        """Return the part of the verdict on checkpoints with equal weights, '' without any."""
        same = [row.name for row in self.weights if row.same]
        if not same:
            return ''
        shown = same[0] if len(same) == 1 else f'{same[0]} to {same[-1]}'
        return (f'the weights in {len(same)} of {len(self.weights)} checkpoint'
                f'{"" if len(self.weights) == 1 else "s"} have the same bits ({shown}), and other ')


def _sentence(first: Divergence) -> str:
    field = first.field
    names = f' ({listed(differing_parts(field))})' if differing_parts(field) else ''
    rank = f', rank {first.rank}' if first.rank else ''
    why = 'what MMEngine logged' if field.field.startswith(LOGGED) else meaning(field.field)
    return f'iteration {first.iteration}{rank}: {field.field}{names} differs first: {why}'


def differing_parts(field: ComparedField) -> tuple[str, ...]:
    """Return the losses, parameters or the call in which a field differs."""
    return field.names or ((field.call, ) if field.call else ())


def compare_paths(path_a: str, path_b: str, weights: bool = True) -> Comparison:
    """Read two runs, with their checkpoints if ``weights``, and compare all that both have."""
    a, b = load_run(path_a, weights), load_run(path_b, weights)
    if a.old or b.old:
        for run in (a, b):
            run.scalars = {i: {name: round(value, DECIMALS) for name, value in row.items()}
                           for i, row in run.scalars.items()}
    if a.name == b.name:
        a.name, b.name = a.path, b.path
    exact, unpaired = bool(a.ranks and b.ranks), not_compared(a.ranks, b.ranks)
    paired = a.ranks.keys() & b.ranks.keys()
    for run in (a, b) if paired else ():
        run.ranks = {rank: run.ranks[rank] for rank in paired}
    iterations_a, iterations_b = (set(run.log.steps if exact else run.scalars) for run in (a, b))
    common = sorted(iterations_a & iterations_b) if paired or not exact else []
    only = sorted(iterations_a - iterations_b), sorted(iterations_b - iterations_a)
    rows, notes = manifest_differences(a, b)
    comparison = Comparison(
        a, b, exact, common, only, manifest=rows,
        losses=columns(a.losses(exact), b.losses(exact)) if common else {},
        vals=columns(a.vals(exact), b.vals(exact)) if common else {},
        lone_vals=(_lone(a.vals(exact), b.vals(exact)), _lone(b.vals(exact), a.vals(exact))),
        notes=_notes(a, b, unpaired if exact else None, only) + notes,
        weights=checkpoint_distances(a, b) if weights else [])
    if exact:
        _compare_fingerprints(comparison)
    else:
        _compare_logs(comparison)
    return comparison


def _notes(a: RunView, b: RunView, unpaired: list[str] | None,
           only: tuple[list[int], list[int]]) -> list[str]:
    """Return notes on both runs; ``unpaired`` are those on fingerprints, None without them."""
    notes = []
    if all(run.ranks or is_known(run) for run in (a, b)) and a.attached != b.attached:
        attached, stock = 'AB' if a.attached else 'BA'
        notes.append(f'{attached} was trained with mmrepro and {stock} without it: their random '
                     'numbers and kernels are not the same, so their bits cannot agree')
    notes += [f'A: {note}' for note in a.notes] + [f'B: {note}' for note in b.notes]
    if unpaired is not None:
        notes += unpaired
    else:
        lacking = ' and '.join(name for name, run in (('A', a), ('B', b)) if not run.ranks)
        notes.append(
            f'{lacking}: no fingerprints, so the logs of MMEngine are compared. They hold losses '
            'of the logged iterations only, means over the last ones, and no gradients or '
            'weights: the iteration named is the first logged one that shows the difference')
    return notes + [
        f'not compared, because {run} lacks them: {counted(len(extra), "iteration")} of {name} '
        f'({extra[0]} to {extra[-1]})' for name, extra, run in zip('AB', only, 'BA') if extra]


def _compare_fingerprints(comparison: Comparison) -> None:
    a, b = comparison.a, comparison.b
    for found in divergences(a.ranks, b.ranks):
        comparison.differing += 1
        comparison.first = comparison.first or found
    if comparison.first is not None:
        first = comparison.first
        comparison.fields = compare_steps(
            *(run.ranks[first.rank].steps[first.iteration] for run in (a, b)))
    comparison.metric = first_differing_metric(a.ranks, b.ranks)
    comparison.diverged = _diverged(a.log, b.log, comparison.common)
    comparison.norms = _norms(a, b, comparison.common)


def _compare_logs(comparison: Comparison) -> None:
    for i in comparison.common:
        logged_a, logged_b = comparison.a.scalars[i], comparison.b.scalars[i]
        # the losses, the norm of the gradients, all others
        names = sorted((name for name in logged_a if name in logged_b),
                       key=lambda name: ('loss' not in name, name == 'grad_norm'))
        fields = [ComparedField(f'{LOGGED}.{name}', a, b, a == b or math.isnan(a) and math.isnan(b))
                  for name in names for a, b in [(logged_a[name], logged_b[name])]]
        differing = tuple(field for field in fields if not field.same)
        comparison.differing += bool(differing)
        if differing and comparison.first is None:
            comparison.first, comparison.fields = Divergence(i, {0: differing}), fields
    metrics = [Divergence(step, {0: (ComparedField(f'metric {name}', x, y), )})
               for name, column in comparison.vals.items() for step, x, y in zip(*column)
               if x != y and (x == x or y == y)]
    comparison.metric = min(metrics, key=lambda found: found.iteration, default=None)


def columns(a: dict[int, dict[str, float]],
            b: dict[int, dict[str, float]]) -> dict[str, Column]:
    """Return, for each name, the steps at which both runs have a value, and both values."""
    shared = {}
    for name in dict.fromkeys(name for row in (*a.values(), *b.values()) for name in row):
        steps = [i for i in sorted(set(a) & set(b)) if name in a[i] and name in b[i]]
        if steps:
            shared[name] = Column(steps, [a[i][name] for i in steps], [b[i][name] for i in steps])
    return shared


def has_objects(column: Column) -> bool:
    """Whether a metric has another value than COCO's for "no such object"."""
    return any(value != NOT_COUNTED for value in (*column.a, *column.b))


def _lone(own: dict[int, dict[str, float]], other: dict[int, dict[str, float]]
          ) -> dict[str, tuple[int, float]]:
    """Return the metrics that another run does not have at any step."""
    known = {name for row in other.values() for name in row}
    return {name: (step, value) for step in sorted(own) for name, value in own[step].items()
            if name not in known and value != NOT_COUNTED}


def _diverged(a: RankLog, b: RankLog, common: list[int]) -> dict[str, int | None]:
    diverged: dict[str, int | None] = {}
    for i in common:
        digests_a, digests_b = (value_of(log.steps[i], f'{BY_NAME}.parameters') or {}
                                for log in (a, b))
        for name in digests_a:
            if name in digests_b and diverged.get(name) is None:
                diverged[name] = i if digests_a[name] != digests_b[name] else None
    return diverged


def _norms(a: RunView, b: RunView, common: list[int]) -> Norms:
    norms_a, norms_b = a.norms, b.norms
    steps = [i for i in common if i in norms_a and i in norms_b]
    if not steps:
        return Norms([], [], [])
    names = [name for name in norms_a[steps[0]] if name in norms_b[steps[0]]]
    rows = []
    for i in steps:
        digests = [value_of(run.log.steps[i], f'{BY_NAME}.parameters') or {} for run in (a, b)]
        rows.append([_relative(norms_a[i].get(name, math.nan), norms_b[i].get(name, math.nan))
                     if digests[0].get(name) != digests[1].get(name) or not digests[0] else 0.
                     for name in names])
    return Norms(steps, names, rows)


def _relative(a: float, b: float) -> float:
    """Return |a - b| / |a|, never 0: it is called only where bits differ."""
    if a == b:
        return 2.**-24  # the norms agree although the bits do not: below their resolution
    return abs(a - b) / abs(a) if a else math.inf


def is_known(run: RunView) -> bool:
    """Whether settings and environment of the run were recorded."""
    return bool(run.manifest or run.facts)


def manifest_differences(a: RunView, b: RunView) -> tuple[list[FactDifference], list[str]]:
    """Compare manifests or, if a run has none, settings and environment.

    A run with several starts has the manifest of the last start, with the initial weights of the
    first start. Return differences, severe ones first, and notes on what cannot be compared.
    """
    if not (is_known(a) and is_known(b)):
        return [], []
    if a.manifest and b.manifest:
        rows = compare_manifests(*(Manifest(run.path, {
            **run.manifest, **{key: run.began[key] for key in OF_THE_START if key in run.began}})
            for run in (a, b)))
        if a.began.get('iteration') == b.began.get('iteration'):
            return rows, []
        # a run was resumed from a run elsewhere: weights of different iterations do not count
        return [row for row in rows if WEIGHTS not in (row.about, row.name)], []
    notes = [f'{letter}: not recorded: {", ".join(unknown(run.facts))}' for letter, run in
             (('A', a), ('B', b)) if not run.manifest and unknown(run.facts)]
    facts = _settings(a), _settings(b)
    if not all(run.manifest or run.recorded for run in (a, b)):
        notes.append(NEVER)
    elif all(MMREPRO in run for run in facts):
        notes.append('neither logs nor checkpoints hold initial weights: whether they differ '
                     'cannot be known')
    else:
        notes.append('initial weights and changes of the code were not recorded: what differs in '
                     'these cannot be known')
    if a.old != b.old:
        facts, without = across_dialects(*facts)
        notes += without
    rows = differences(*({name: value for name, value in run.items() if name.startswith(SETTINGS)
                          or name in other and not a.manifest and not b.manifest}
                         for run, other in (facts, facts[::-1])))
    if a.attached == b.attached:
        return rows, notes
    # this row stands for all that mmrepro adds to a config
    first = [row for row in rows if row.name == ATTACHED]
    return first + [row for row in rows if row.name not in (ATTACHED, 'config.runner_type') and (
        row.name in STOCK_RANDOMNESS or not row.name.startswith('randomness.'))], notes


def _settings(run: RunView) -> dict[str, Any]:
    facts = Manifest(run.path, run.manifest).facts if run.manifest else run.facts
    return {ATTACHED: run.attached, **facts}


_SHAPE = {'meta?': {'iter?': int}, 'state_dict?': {str: object}, str: object}
_NUMBERED = re.compile(r'(epoch|iter)_(\d+)\.pth')


class Distance(NamedTuple):
    """Weights of A and B in one pair of checkpoints."""
    name: str  # file name
    iteration: int | None  # iterations trained, from the checkpoint; None if it does not say
    # L2 norm of the difference over all floating-point tensors; None: see ``note``
    distance: float | None
    relative: float | None  # divided by the norm of A's
    # names and relative distances of the tensors that differ most
    largest: tuple[tuple[str, float], ...] = ()
    note: str = ''  # why there is no distance, or what is not in it
    same: bool = False  # whether all weights have the same bits


def checkpoint_distances(a: RunView, b: RunView) -> list[Distance]:
    """Compare the numbered checkpoints that both runs have, in the order of training."""
    numbered = {match[0]: int(match[2]) for match in map(_NUMBERED.fullmatch, a.checkpoints)
                if match and match[0] in b.checkpoints}
    rows = []
    for name in sorted(numbered, key=numbered.__getitem__):
        try:
            checkpoint_a, checkpoint_b = (
                checked(path, load(path), CheckpointError, _SHAPE)
                for path in (run.checkpoints[name] for run in (a, b)))
        except (CheckpointError, OSError) as error:
            rows.append(Distance(name, None, None, None, note=str(error).splitlines()[0]))
            continue
        iteration = checkpoint_a.get('meta', {}).get('iter')
        rows.append(distance(name, iteration, *(  # `meta` has the time
            checkpoint.get('state_dict', {**checkpoint, 'meta': None})
            for checkpoint in (checkpoint_a, checkpoint_b))))
    return rows


def _real(values: torch.Tensor) -> torch.Tensor:
    """Return complex values as pairs of real ones, and others as they are."""
    return torch.view_as_real(values.resolve_conj()) if values.is_complex() else values


def distance(name: str, iteration: int | None, a: dict[str, Any],
             b: dict[str, Any]) -> Distance:
    """Compare two state dicts, in float64; equal bits (NaN as well) have distance 0."""
    squares = norms = 0.
    parts: dict[str, float] = {}
    left_out = sorted(set(a) ^ set(b))
    for key in a:
        tensor_a, tensor_b = a[key], b.get(key)
        if not (isinstance(tensor_a, torch.Tensor) and isinstance(tensor_b, torch.Tensor)):
            continue
        if tensor_a.shape != tensor_b.shape:
            left_out.append(key)
            continue
        tensor_a, tensor_b = (
            _real(tensor).double().flatten() for tensor in (tensor_a, tensor_b))
        equal = (tensor_a == tensor_b) | (tensor_a.isnan() & tensor_b.isnan())
        gap = torch.where(equal, 0., tensor_a - tensor_b)
        square = float(gap.square().sum())
        squares, norms = squares + square, norms + float(tensor_a.square().sum())
        if square:
            parts[key] = math.sqrt(square) / (float(tensor_a.norm()) or 1.)
    note = f'not in both, or of another shape: {", ".join(left_out[:3])}' if left_out else ''
    largest = tuple(sorted(parts.items(), key=lambda item: -item[1])[:5])
    same = not squares and state_digest(a) == state_digest(b)
    if not (same or squares or note):
        note = 'equal values with different bits: the sign of zeros, or the payload of NaN'
    return Distance(name, iteration, math.sqrt(squares), math.sqrt(squares / norms) if norms else
                    0., largest, note, same)
