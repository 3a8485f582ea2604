"""Where a run resumes: read from the checkpoint before anything is built."""
from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Dict, List, Optional, Tuple

from ..config import RandomnessConfig, RandomnessError
from .completeness import judge, stock_facts, why_not
from .files import is_remote, load, newest_good

__all__ = ['ResumePoint', 'find_point']


@dataclass(frozen=True)
class ResumePoint:
    """A checkpoint to resume from.

    Attributes:
        path: of the file.
        epoch: that continues or begins.
        iteration: that comes next, counted from 0.
        seed: of the run that wrote it; None when unknown.
        written_by: what mmrepro wrote of that run; empty for a checkpoint of stock MMEngine.
        facts: settings, versions and hardware of that run, see :mod:`mmrepro.facts.collect`; of
            stock MMEngine's, the settings.
        report: what was chosen, for the log.
        place: (pass over the data, batches of it that are done); None when unknown.
    """
    path: str
    epoch: int
    iteration: int
    seed: Optional[int]
    written_by: Dict[str, Any]
    facts: Dict[str, Any]
    report: str
    place: Optional[Tuple[int, int]] = None

    def seeded(self, given: RandomnessConfig) -> RandomnessConfig:
        """``given`` with the seed of the run that is resumed.

        Raises:
            RandomnessError: when ``given`` names another seed.
        """
        if self.seed is None:
            return given
        if given.seed is not None and given.seed != self.seed:
            raise RandomnessError(
                f'randomness.seed={given.seed!r}, but {self.path} comes from a run with seed '
                f'{self.seed}; resume with that seed or with seed=None, or start a new run from '
                'the weights: load_from=..., resume=False')
        return given.with_seed(self.seed)


def find_point(load_from: Optional[str], work_dir: str,
               strict: bool) -> Tuple[Optional[ResumePoint], List[str]]:
    """The checkpoint that ``resume=True`` means.

    Args:
        load_from: named by the user, or None for the newest complete one in ``work_dir``.
        strict: ``resume_strict``; otherwise a named file may lack the optimizer.

    Returns:
        None when there is nothing to resume from: the run begins at the beginning. And lines for
        the log: what was passed over and why.

    Raises:
        FileNotFoundError, CheckpointError: the named file is missing, damaged, or something else.
        ResumeError: the named file holds weights, but not what a run goes on from.
    """
    path, passed = load_from, []
    if is_remote(dict(load_from=path, work_dir=work_dir)):
        return None, passed  # MMEngine fetches it; its seed is not known beforehand
    if path is None:
        path, passed = newest_good(work_dir, why_not)
        if path is None:
            if passed:
                passed.append('nothing is left to resume from: the run begins at the beginning')
            return None, passed
    content = load(path, map_location='meta')
    passed += judge(path, content, strict)
    meta = content['meta']
    lines = [f'resuming from {path}: epoch {meta["epoch"]}, iteration {meta["iter"]}']
    written_by = meta.get('mmrepro', {})
    if not written_by:
        lines.append('it was written without mmrepro: weights, optimizer and schedules continue; '
                     'data order and random numbers are those of mmrepro from here on')
    facts = written_by.get('facts') or stock_facts(meta)
    return ResumePoint(path, meta['epoch'], meta['iter'], meta.get('seed'), written_by, facts,
                       '\n'.join(lines),
                       tuple(meta['place']) if 'place' in meta else None), passed
