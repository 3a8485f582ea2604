"""Name the first thing that differs between two runs.

Two fresh processes (or sets of ranks) train the same config, or one config in two ways. Where their
fingerprints part, both run again up to that iteration and record it: samples, operators, hooks.
"""
from __future__ import annotations

import os
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Sequence, Tuple

from ..fingerprint.reader import Run, read_run
from .compared_runs import Side, start
from .diagnosis import Finding, find_on_ranks
from .recording import Plan
from .values import Values, compare_kept
from .variation_effect import effects

__all__ = ['Localiser', 'Outcome', 'first_iteration']

FIELDS = ('batch', 'losses', 'lr', 'gradients', 'parameters', 'buffers', 'optimizer')
EXTRA_RUNS = 2  # of the prefix, at most

Launch = Callable[[Side, str, Plan], None]


class Parting(NamedTuple):
    """Where two runs' fingerprints part.

    Attributes:
        iteration: the first that differs.
        fields: what of it, per rank: 'losses', 'gradients', ...
        places: of the samples of that batch, of all ranks; None when the runs do not know.
    """
    iteration: int
    fields: Dict[int, Tuple[str, ...]]
    places: Optional[Tuple[int, ...]]


class Outcome(NamedTuple):
    """What a search has come to.

    Attributes:
        verdict: 'equal', 'found', or 'flaky': the fingerprints differed, and the recorded runs
            do not.
        compared: iterations that were compared.
        parting: where the fingerprints part.
        finding: the first difference.
        values: how far the named operator's results are apart.
        notes: what a reader should know.
    """
    verdict: str
    compared: int
    parting: Optional[Parting] = None
    finding: Optional[Finding] = None
    values: Optional[Values] = None
    notes: Tuple[str, ...] = ()

    def text(self) -> str:
        lines = [*self.notes]
        if self.verdict == 'equal':
            return '\n'.join([*lines, f'SAME BITS: {self.compared} iterations agree'])
        fields = sorted({name for names in self.parting.fields.values() for name in names},
                        key=FIELDS.index)
        lines.append(f'DIFFERENT from iteration {self.parting.iteration} on: {", ".join(fields)}')
        if self.verdict == 'flaky':
            return '\n'.join([*lines, FLAKY.format(iteration=self.parting.iteration)])
        lines += ['first difference:', self.finding.text()]
        if self.values is not None:
            lines.append(f'  values    {self.values.text()}')
        return '\n'.join(lines)

    def as_dict(self) -> Dict[str, Any]:
        return dict(
            verdict=self.verdict, compared=self.compared, notes=list(self.notes),
            parting=self.parting._asdict() if self.parting else None,
            finding=self.finding.as_dict() if self.finding else None,
            values=self.values._asdict() if self.values else None)


FLAKY = ('NOT REPRODUCED: the fingerprints differ, and two further runs of each side, which were '
         'recorded up to iteration {iteration}, agree with each other.\nThe cause comes and goes: '
         'a race, the load of the machine, memory contents, or hardware. Run again, longer '
         '(--iters) or several times; mmrepro verify repeats runs.')


class Localiser:
    """Runs the sides and compares.

    Args:
        sides: the two sides.
        work_dir: a new folder.
        launch: starts one run of a side and waits for it.
        say: takes lines on the progress.
    """

    def __init__(self, sides: Tuple[Side, Side], work_dir: str, launch: Launch = start,
                 say: Callable[[str], None] = lambda line: None) -> None:
        self.sides, self.work_dir, self.launch, self.say = sides, work_dir, launch, say

    def search(self, iterations: int, values: bool = True) -> Outcome:
        """Train both sides for this many iterations, then look where they part."""
        folders = self._run('fingerprints', Plan('', iterations - 1))
        return self.explain(*map(read_run, folders), values)

    def explain(self, run_a: Run, run_b: Run, values: bool = True) -> Outcome:
        """The first difference of two runs whose fingerprints exist."""
        compared, parting = first_iteration(run_a, run_b)
        notes = tuple(f'{side.name}: {note}' for side, run in zip(self.sides, (run_a, run_b))
                      for note in run.notes) + tuple(effects(self.sides, (run_a, run_b)))
        if parting is None:
            return Outcome('equal', compared, notes=notes)
        ranks, first = sorted(parting.fields), parting
        for number in range(EXTRA_RUNS):
            self.say(f'the fingerprints part at iteration {parting.iteration}; recording it')
            name = f'record{number}'
            folders = self._run(name, Plan('', parting.iteration, parting.iteration,
                                           parting.places))
            earlier = first_iteration(*map(read_run, folders))[1]
            if earlier is not None and earlier.iteration < parting.iteration:
                notes += (f'run again, they part at iteration {earlier.iteration}, not '
                          f'{parting.iteration}: the cause does not come in every run', )
                parting = earlier
                continue
            finding = find_on_ranks(parting.iteration, *folders, ranks)
            if finding is not None:
                kept = self._values(finding, parting) if values and number == 0 else None
                return Outcome('found', compared, parting, finding, kept, notes)
        return Outcome('flaky', compared, first, notes=notes)

    def _values(self, finding: Finding, parting: Parting) -> Optional[Values]:
        """How far apart the results of the named operator are: one more run."""
        if finding.kind not in ('output', 'generator') or finding.record_a is None or (
                not finding.stack):
            return None
        self.say(f'running again for the values of {finding.operator}')
        folders = []
        for side, number in zip(self.sides, (finding.record_a, finding.record_b)):
            plan = Plan('', parting.iteration, parting.iteration, (), {finding.rank: number})
            folders.append(self._run_side(side, 'values', plan))
        return compare_kept(*folders, finding.rank)

    def _run(self, name: str, plan: Plan) -> List[str]:
        return [self._run_side(side, name, plan) for side in self.sides]

    def _run_side(self, side: Side, name: str, plan: Plan) -> str:
        folder = os.path.join(self.work_dir, side.name, name)
        os.makedirs(folder)
        self.say(f'side {side.name}: {plan.stop + 1} iterations')
        self.launch(side, folder, plan._replace(folder=folder))
        return folder


def first_iteration(run_a: Run, run_b: Run) -> Tuple[int, Optional[Parting]]:
    """How many iterations both runs have, and the first that differs on any rank.

    Raises:
        ValueError: the runs have different ranks, or no iteration in common.
    """
    if set(run_a.ranks) != set(run_b.ranks):
        raise ValueError(f'{run_a.work_dir} has ranks {sorted(run_a.ranks)}, {run_b.work_dir} has '
                         f'ranks {sorted(run_b.ranks)}: the runs cannot be compared')
    common = [set(run_a.ranks[rank].steps) & set(run_b.ranks[rank].steps) for rank in run_a.ranks]
    iterations = sorted(set.intersection(*common))
    if not iterations:
        raise ValueError(f'{run_a.work_dir} and {run_b.work_dir} have no iteration in common')
    for iteration in iterations:
        steps = {rank: (run_a.ranks[rank].steps[iteration], run_b.ranks[rank].steps[iteration])
                 for rank in run_a.ranks}
        fields = {rank: tuple(name for name in FIELDS if _value(a, name) != _value(b, name))
                  for rank, (a, b) in steps.items()}
        if any(fields.values()):
            return len(iterations), Parting(iteration, fields, _places(steps.values()))
    return len(iterations), None


def _value(step: Dict[str, Any], name: str) -> Any:
    return step['batch']['data'] if name == 'batch' else step.get(name)


def _places(steps: Sequence[Any]) -> Optional[Tuple[int, ...]]:
    lists = [step['batch'].get('positions') for pair in steps for step in pair]
    if any(places is None for places in lists):
        return None
    return tuple(sorted({place for places in lists for place in places}))
