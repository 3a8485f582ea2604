"""Name the first thing that differs between two runs.

Two fresh processes (or sets of ranks) train the same config, or one config in two ways. Where their
fingerprints part, both run again up to that iteration and record it: samples, operators, hooks.
"""
from __future__ import annotations

import os
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Tuple

from ..fingerprint.difference import Divergence, first_divergence, not_compared
from ..fingerprint.reader import RecordedRun, read_run
from ..fingerprint.schema import value_of
from .compared_runs import Side, start
from .diagnosis import Finding, find_on_ranks
from .recording import Plan
from .values import Values, compare_kept
from .variation_effect import effects

__all__ = ['Localiser', 'Outcome', 'first_iteration']

EXTRA_RUNS = 2  # of the prefix, at most

Launch = Callable[[Side, str, Plan], None]


class Outcome(NamedTuple):
    """What a search has come to.

    Attributes:
        verdict: 'equal', 'found', or 'flaky': the fingerprints differed, and the recorded runs
            do not.
        compared: iterations that were compared.
        divergence: the first iteration whose fingerprints differ.
        positions: of the samples of that batch, of all ranks; None when the runs do not know.
        finding: the first difference.
        values: how far the named operator's results are apart.
        notes: what a reader should know.
    """
    verdict: str
    compared: int
    divergence: Optional[Divergence] = None
    positions: Optional[Tuple[int, ...]] = None
    finding: Optional[Finding] = None
    values: Optional[Values] = None
    notes: Tuple[str, ...] = ()

    def text(self) -> str:
        lines = [*self.notes]
        if self.verdict == 'equal':
            return '\n'.join([*lines, f'SAME BITS: {self.compared} iterations agree'])
        differing = {one.field: one.order for fields in self.divergence.ranks.values()
                     for one in fields}
        lines.append(f'DIFFERENT from iteration {self.divergence.iteration} on: '
                     f'{", ".join(sorted(differing, key=differing.get))}')
        if self.verdict == 'flaky':
            return '\n'.join([*lines, FLAKY.format(iteration=self.divergence.iteration)])
        lines += ['first difference:', self.finding.text()]
        if self.values is not None:
            lines.append(f'  values    {self.values.text()}')
        return '\n'.join(lines)

    def as_dict(self) -> Dict[str, Any]:
        found = self.divergence
        return dict(
            verdict=self.verdict, compared=self.compared, notes=list(self.notes),
            parting=None if found is None else dict(
                iteration=found.iteration, places=self.positions,
                fields={rank: [one.field for one in fields]
                        for rank, fields in found.ranks.items()}),
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

    def explain(self, run_a: RecordedRun, run_b: RecordedRun, values: bool = True) -> Outcome:
        """The first difference of two runs whose fingerprints exist."""
        compared, found = first_iteration(run_a, run_b)
        notes = tuple(f'{side.name}: {note}' for side, run in zip(self.sides, (run_a, run_b))
                      for note in run.notes) + tuple(effects(self.sides, (run_a, run_b))) + tuple(
                          not_compared(run_a.ranks, run_b.ranks))
        if found is None:
            return Outcome('equal', compared, notes=notes)
        ranks, first = sorted(found.ranks), found
        positions = positions_of(run_a, run_b, found.iteration)
        for number in range(EXTRA_RUNS):
            self.say(f'the fingerprints differ from iteration {found.iteration} on; recording it')
            name = f'record{number}'
            folders = self._run(name, Plan('', found.iteration, found.iteration, positions))
            again = tuple(map(read_run, folders))
            earlier = first_iteration(*again)[1]
            if earlier is not None and earlier.iteration < found.iteration:
                notes += (f'run again, they differ from iteration {earlier.iteration} on, not '
                          f'{found.iteration}: the cause does not come in every run', )
                found, positions = earlier, positions_of(*again, earlier.iteration)
                continue
            finding = find_on_ranks(found.iteration, *folders, ranks)
            if finding is not None:
                kept = self._values(finding, found.iteration) if values and number == 0 else None
                return Outcome('found', compared, found, positions, finding, kept, notes)
        return Outcome('flaky', compared, first, positions, notes=notes)

    def _values(self, finding: Finding, iteration: int) -> Optional[Values]:
        """How far apart the results of the named operator are: one more run."""
        if finding.kind not in ('output', 'generator') or finding.record_a is None or (
                not finding.stack):
            return None
        self.say(f'running again for the values of {finding.operator}')
        folders = []
        for side, number in zip(self.sides, (finding.record_a, finding.record_b)):
            plan = Plan('', iteration, iteration, (), {finding.rank: number})
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


def first_iteration(run_a: RecordedRun,
                    run_b: RecordedRun) -> Tuple[int, Optional[Divergence]]:
    """How many iterations both runs have, and the first that differs on any rank.

    Raises:
        ValueError: the runs have different ranks, or no iteration in common.
    """
    if set(run_a.ranks) != set(run_b.ranks):
        raise ValueError(f'{run_a.work_dir} has ranks {sorted(run_a.ranks)}, {run_b.work_dir} has '
                         f'ranks {sorted(run_b.ranks)}: the runs cannot be compared')
    common = set.intersection(*(set(run_a.ranks[rank].steps) & set(run_b.ranks[rank].steps)
                                for rank in run_a.ranks))
    if not common:
        raise ValueError(f'{run_a.work_dir} and {run_b.work_dir} have no iteration in common')
    return len(common), first_divergence(run_a.ranks, run_b.ranks)


def positions_of(run_a: RecordedRun, run_b: RecordedRun,
                 iteration: int) -> Optional[Tuple[int, ...]]:
    """Positions of all samples of an iteration, of both runs; None when a run does not know."""
    lists = [value_of(log.steps[iteration], 'batch.positions')
             for run in (run_a, run_b) for log in run.ranks.values() if iteration in log.steps]
    if None in lists:
        return None
    return tuple(sorted({position for positions in lists for position in positions}))
