"""One metric over seeds and configs, and what the tests say about it."""
from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from ..errors import RunError, SeedsError
from .run_view import load_run
from .stats import (
    LEVEL,
    Equivalence,
    Paired,
    Plan,
    Summary,
    equivalence,
    holm,
    paired,
    plan,
    summary,
)

# the default metric: the first of these that the run has
USUAL = ('coco/bbox_mAP', 'coco/segm_mAP', 'pascal_voc/mAP')


class Study(NamedTuple):
    """One metric over the seeds of one or more configs; the first is what others are tested on."""
    metric: str  # which metric, of which validation
    pick: str
    seeds: list[int]  # those of every config
    values: dict[str, list[float]]  # label of the config -> a value per seed
    summaries: dict[str, Summary]  # label -> summary
    tests: dict[str, Paired]  # label of each other config -> it against the first
    corrected: dict[str, float]  # p of the t test, by Holm's method if there are several
    equivalences: dict[str, Equivalence]  # if a margin was given
    plans: dict[str, Plan]  # if a difference to plan for was given; label of the only config, too

    @property
    def test(self) -> Paired | None:
        """The test of two configs; None for another number of them."""
        return next(iter(self.tests.values())) if len(self.tests) == 1 else None

    @property
    def larger(self) -> dict[str, bool]:
        """Label of each other config -> its difference is larger than the noise of the seed."""
        return {label: one.larger and self.corrected[label] < LEVEL
                for label, one in self.tests.items()}

    @property
    def answer(self) -> bool | None:
        """Whether what was asked for was found; None if nothing was asked."""
        if self.equivalences:
            return all(one.same for one in self.equivalences.values())
        return any(self.larger.values()) if self.tests else None


def study(metric: str, pick: str, seeds: list[int], values: dict[str, list[float]],
          margin: float | None = None, difference: float | None = None) -> Study:
    """Summaries, and a paired test of each config against the first.

    Args:
        margin: test for "the same within", too.
        difference: say how many seeds it takes to find it.
    """
    first, *others = values
    if margin is not None and not others:
        raise SeedsError('--same-within needs --compare: the same as what?')
    tests = {label: paired(values[first], values[label]) for label in others}
    # differences that are all the same have no t test: nothing could make them noise
    p = [float(not one.difference.mean) if one.t_p is None else one.t_p for one in tests.values()]
    equivalences = {} if margin is None else {
        label: equivalence(values[first], values[label], margin) for label in others}
    if len(equivalences) > 1:
        adjusted = holm([one.p for one in equivalences.values()])
        equivalences = {label: one._replace(p=now, same=now < LEVEL)
                        for (label, one), now in zip(equivalences.items(), adjusted)}
    plans = {} if difference is None else {
        label: plan(values[first], difference, values[label] if others else None)
        for label in others or [first]}
    return Study(metric, pick, seeds, values, {label: summary(values[label]) for label in values},
                 tests, dict(zip(tests, holm(p))), equivalences, plans)


def metrics_of(folder: str) -> dict[str, list[tuple[int, float]]]:
    """Metric -> ``(step, value)`` of all validations, from MMEngine's logs or the fingerprints."""
    try:
        run = load_run(folder)
    except RunError:
        return {}
    vals = run.vals(True) if run.ranks and run.log.vals else run.logged_vals
    found: dict[str, list[tuple[int, float]]] = {}
    for step in sorted(vals):
        for name, value in vals[step].items():
            found.setdefault(name, []).append((step, value))
    return found


def choose_metric(results: Sequence[dict[str, Any]], wanted: str | None) -> str:
    """The metric that is asked for, the usual one, or the first."""
    shared = [name for name in results[0]['metrics']
              if all(name in result['metrics'] for result in results)]
    if wanted is None:
        wanted = next((name for name in USUAL if name in shared), shared[0] if shared else None)
    if wanted is None or wanted not in shared:
        raise SeedsError(f'--metric {wanted}: not every run has it; all have: '
                         f'{", ".join(shared) or "none"}')
    return wanted


def value_of(result: dict[str, Any], metric: str, pick: str = 'last') -> float:
    """The metric of the last validation, or of the best one (``pick='best'``)."""
    values = [value for _, value in result['metrics'][metric]]
    return float(max(values)) if pick == 'best' else float(values[-1])
