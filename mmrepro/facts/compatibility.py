"""Consequences of differences between two environments, for resumes, manifests and replays.

The table is ``compatibility.csv``. A name is that of a fact (:mod:`mmrepro.facts.collect`) or of a
field of a manifest, flattened.
"""
from __future__ import annotations

import csv
import fnmatch
import os
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Callable, NamedTuple

from ..errors import ResumeError
from ..util.text import listed
from .known_hooks import (
    AVERAGES_AT_EPOCH_END,
    AVERAGES_AT_VALIDATION,
    counting_from_the_end,
    is_watching,
    plays,
    without_watchers,
)
from .measured import by_instructions, effect
from .own_code import MMREPRO, PREFIX

CHANGES, MAY, HARMLESS = SEVERITIES = ('changes bits', 'may change bits', 'harmless')
# subjects of rows of the table, beside settings
START = 'start'  # when, where and how the process was started: a repetition differs in it by design
WEIGHTS = 'weights'  # the weights that the training begins from: they may follow from other rows
HISTORY = 'history'  # a fact: what earlier resumes of the run found different
ATTACHED = 'mmrepro'  # a fact of comparisons: whether mmrepro ran the training

MAX_DOUBTS = 8  # in a line
MAX_ROWS = 40  # of a table; the rest is counted
ABSENT = '(not set)'
VERSION = 'version.'  # prefix of facts
_MEASURED = 'measured: '  # begins the consequence of a version that `measured.json` knows
# of MMEngine's `randomness`, which a stock run need not set
DEFAULTS = {'randomness.diff_rank_seed': False, 'randomness.deterministic': False}
_RESTORED = ('A resume takes the learning rate and other numbers of optimizers and schedules from '
             'the checkpoint, whatever the config says.\n')
_WIDTHS = (48, 30, 30, 80)  # of the columns, in characters


class FactDifference(NamedTuple):
    """A fact or field that differs. ``severity`` is one of :data:`SEVERITIES`."""
    name: str
    then: Any
    now: Any
    severity: str
    consequence: str
    about: str = ''  # START, WEIGHTS or ''


class FactRule(NamedTuple):
    """The consequence of a difference in values whose names match ``pattern``."""
    pattern: str  # as in fnmatch
    severity: str  # one of SEVERITIES
    consequence: str  # for the table
    only: str = ''  # key of CONDITIONS, which says what follows unless it holds
    about: str = ''  # START, WEIGHTS or ''


def _reacts_to_metrics(facts: Mapping[str, Any]) -> list[str]:
    """Return the hooks and schedules that do."""
    return [value for value in facts.values() if isinstance(value, str) and (
        value.endswith('EarlyStoppingHook') or 'ReduceOnPlateau' in value)]


def _averages_at_validation(facts: Mapping[str, Any]) -> bool:
    """Whether training goes on with statistics that ranks average before each validation."""
    if facts.get('world_size', 1) == 1:
        return False
    hooks = [value for name, value in facts.items()
             if name.startswith(('config.custom_hooks', 'config.default_hooks'))
             and name.endswith('type')]
    if any(plays(hook, AVERAGES_AT_VALIDATION) for hook in hooks):
        return True
    # a loop may have no epochs
    by_epoch = facts.get('config.train_cfg.by_epoch') is True or str(
        facts.get('config.train_cfg.type')).endswith('EpochBasedTrainLoop')
    return not by_epoch and any(plays(hook, AVERAGES_AT_EPOCH_END) for hook in hooks)


def _no_digest_of(*names: str) -> Callable[[Mapping[str, Any]], bool]:
    """Return a condition that holds if a run identifies its data by path only."""
    # before its data are loaded, and in a manifest, a run has no facts on them; logs have no scheme
    return lambda facts: ('train_samples' in facts or 'scheme' not in facts) and any(
        name not in facts for name in names)


def _without_mmrepro(facts: Mapping[str, Any]) -> bool:
    """Whether the facts are of a run of stock MMEngine."""
    return facts.get(ATTACHED) is False


def _has_worker_streams(facts: Mapping[str, Any]) -> bool:
    """Whether the random numbers of samples depend on the workers that load them."""
    return _without_mmrepro(facts) or facts.get('randomness.worker_seed', 'sample') != 'sample'


_OF_SAMPLES = 'each sample has a stream of its own'
_BY_CONTENT = 'the data are compared by what they hold'


class Condition(NamedTuple):
    """When a fact matters, and why it does not otherwise, or what may follow then."""
    holds: Callable[[Mapping[str, Any]], Any]  # a list names why it does
    otherwise: str
    severity: str = HARMLESS  # otherwise


CONDITIONS = {
    'end': Condition(
        lambda facts: [*counting_from_the_end(facts), *_reacts_to_metrics(facts)]
        or _averages_at_validation(facts), 'nothing counts from the end of the training'),
    'no annotations': Condition(_no_digest_of('train_annotations'), _BY_CONTENT),
    'no images': Condition(_no_digest_of('train_images'), _BY_CONTENT),
    'no data': Condition(_no_digest_of('train_annotations', 'train_images'), _BY_CONTENT),
    'other batches': Condition(
        lambda facts: 'avx2' not in str(facts.get('hardware.cpu_features')).split()
        or by_instructions(facts),
        'batches are the same on CPUs with AVX2; the kernels of training are compared by the CPU'),
    'own kernels': Condition(lambda facts: facts.get('randomness.numerics.cpu') != 'portable',
                             "randomness.numerics.cpu='portable' has the bits of every CPU"),
    'own level': Condition(lambda facts: facts.get('randomness.numerics.cpu') is None,
                           'randomness.numerics.cpu pins the instruction sets'),
    'cuda': Condition(lambda facts: facts.get('hardware.gpu') is not None, 'no GPU is used'),
    'Triton': Condition(
        lambda facts: facts.get('hardware.gpu') is not None or any(
            value == 'triton' for name, value in facts.items() if name.startswith('operators')),
        'no kernel of Triton runs'),
    'ranks': Condition(lambda facts: facts.get('world_size', 1) > 1, 'there is one rank'),
    # with more than two ranks: a + b is b + a. Virtual ranks exchange bytes, and add them up in an
    # order of their own
    'nccl': Condition(lambda facts: facts.get('hardware.gpu') is not None and facts.get(
        'world_size', 1) > 2 and facts.get('randomness.virtual_ranks.ranks') is None,
                      'NCCL does not affect the order of any sum'),
    'worker streams': Condition(_has_worker_streams, _OF_SAMPLES),
    'worker streams of validation': Condition(
        lambda facts: _has_worker_streams(facts) and _reacts_to_metrics(facts), _OF_SAMPLES),
    # scikit-learn 1.5.2 and 1.7.2 fitted other mixtures in 700 of 700 cases
    'PAA': Condition(lambda facts: any(str(value).endswith('PAAHead') for value in facts.values()),
                     'another implementation', MAY),
    'Albu': Condition(lambda facts: any(value == 'Albu' for value in facts.values()),
                      'another implementation', MAY),
    'no digests of code': Condition(lambda facts: MMREPRO not in facts,
                                    'imported files are compared one by one'),
    'stock': Condition(_without_mmrepro, 'no order comes from hashes'),
    'metrics': Condition(_reacts_to_metrics, 'training does not react to metrics'),
    'validation': Condition(
        lambda facts: _without_mmrepro(facts) or _reacts_to_metrics(facts)
        or _averages_at_validation(facts), 'training does not react to validation'),
}


def _rules() -> Iterator[FactRule]:
    """Yield the rules of the table; the first whose pattern matches counts.

    From ``initial_weights`` on, the names are fields of a manifest that are no facts. torchrun sets
    ``TORCH_NCCL_ASYNC_ERROR_HANDLING``.
    """
    with open(Path(__file__).with_suffix('.csv'), encoding='utf-8', newline='') as file:
        for row in csv.DictReader(file):
            patterns = row.pop('patterns').split()
            yield from (FactRule(pattern, **row) for pattern in patterns)


RULES = tuple(_rules())

# facts that exist only once a module is imported, the data are loaded, or a variable is read
_LATE = ('version.', 'library.', 'train_', 'torch._dynamo', 'variables.')
_UNKNOWN = ('unavailable', 'mmcv is not in use')


def severity(name: str, facts: Mapping[str, Any]) -> str:
    """Return the severity of a change of the fact ``name``: one of :data:`SEVERITIES`."""
    return _judged(_rule(name), facts)[0]


def _rule(name: str) -> FactRule:
    return next(rule for rule in RULES if fnmatch.fnmatchcase(name, rule.pattern))


def _judged(rule: FactRule, *runs: Mapping[str, Any]) -> tuple[str, str]:
    """Return severity and consequence of a value that differs between these runs."""
    if not rule.only:
        return rule.severity, rule.consequence
    reasons = [reason for reason in map(CONDITIONS[rule.only].holds, runs) if reason]
    if not reasons:
        return CONDITIONS[rule.only].severity, CONDITIONS[rule.only].otherwise
    names = dict.fromkeys(name for reason in reasons if isinstance(reason, list) for name in reason)
    named = f': {listed(list(names))}' if names else ''
    return rule.severity, f'{rule.consequence}{named}'


def _by_measurement(name: str, before: Any, after: Any, judged: tuple[str, str],
                    *runs: Mapping[str, Any]) -> tuple[str, str]:
    """Return severity and consequence with what was measured for two versions, if they are any."""
    package = name[len(VERSION):]
    if not name.startswith(VERSION) or judged[0] == HARMLESS:
        return judged
    measured = effect(package, before, after, *runs)
    if measured is None:
        return judged
    # of NumPy and torch, the table has a few of many calls
    if measured.all_equal and package not in ('numpy', 'torch'):
        return MAY, _MEASURED + measured.text()
    return judged[0], _MEASURED + measured.text()


def differences(then: Mapping[str, Any], now: Mapping[str, Any]) -> list[FactDifference]:
    """Return the differences of two environments, facts and fields of manifests by name.

    They are in the order of :data:`SEVERITIES`, by name within.
    """
    rows = []
    then, now = without_watchers(then), without_watchers(now)
    for name in {*then, *now}:
        before, after = (facts.get(name, DEFAULTS.get(name, ABSENT)) for facts in (then, now))
        same = before == after and isinstance(before, bool) == isinstance(after, bool)
        not_asked = name.startswith(_LATE) and ABSENT in (before, after)
        not_asked |= name.startswith('operators.') and (
            then.get('operators') in _UNKNOWN or now.get('operators') in _UNKNOWN)
        not_asked |= name.startswith(PREFIX) and not (MMREPRO in then and MMREPRO in now)
        if same or before in _UNKNOWN or after in _UNKNOWN or not_asked:
            continue
        rule = _rule(name)
        if any(is_watching(name, facts) for facts in (then, now)):
            judged = HARMLESS, 'the hook changes nothing'
        else:
            judged = _by_measurement(name, before, after, _judged(rule, then, now), then, now)
        rows.append(FactDifference(name, before, after, *judged, rule.about))
    return sorted(rows, key=lambda row: (SEVERITIES.index(row.severity), row.name))


def doubts(rows: Sequence[FactDifference]) -> list[str]:
    """Return short texts on the differences that are not harmless: files, versions, variables."""
    may = [row for row in rows if row.severity != HARMLESS]
    code: dict[str, list[str]] = {'edited': [], 'new': [], 'missing': []}
    for row in may:
        if row.name.startswith(PREFIX):
            how = 'edited'
            if row.then == ABSENT:
                how = 'new'
            elif row.now == ABSENT:
                how = 'missing'
            code[how].append(row.name[len(PREFIX):])
    return [f'{how} code: {listed(names, 5)}' for how, names in code.items() if names] + [
        _history(row) if row.name == HISTORY else
        f'{row.name} {_cut(_text(row.then), 24)} -> {_cut(_text(row.now), 24)}'
        for row in may if not row.name.startswith(PREFIX)]


def _history(row: FactDifference) -> str:
    """Return what two runs found different when they were resumed, run A first."""
    return '; '.join(f'{run} was {found}' for run, found in (('A', row.then), ('B', row.now))
                     if found != ABSENT)


def table(rows: Sequence[FactDifference]) -> str:
    """Format name, values and consequence of each row; long values are shortened."""
    shown = [('', 'then', 'now', 'consequence'), *(
        (row.name, *_from_difference(_text(row.then), _text(row.now)), row.consequence)
        for row in rows[:MAX_ROWS])]
    widths = [min(width, max(len(line[column]) for line in shown))
              for column, width in enumerate(_WIDTHS)]
    lines = ['  '.join(_cut(cell, width).ljust(width) for cell, width in zip(line, widths)).rstrip()
             for line in shown]
    if len(rows) > MAX_ROWS:
        lines.append(f'and {len(rows) - MAX_ROWS} more')
    return textwrap.indent('\n'.join(lines), '  ')


def _first(texts: Sequence[str]) -> str:
    """Join the first :data:`MAX_DOUBTS` texts in a line, and say how many more there are."""
    more = len(texts) - MAX_DOUBTS
    return '; '.join([*texts[:MAX_DOUBTS], *([f'and {more} more'] if more > 0 else [])])


def check(path: str, rows: Sequence[FactDifference], strict: bool) -> list[str]:
    """Return lines for the log about what differs from the run that wrote ``path``.

    Raises:
        ResumeError: ``strict``, and a difference changes bits.
    """
    serious = [row for row in rows if row.severity == CHANGES]
    harmless = [f'{row.name} {_cut(_text(row.then), 24)} -> {_cut(_text(row.now), 24)}'
                for row in rows if row.severity == HARMLESS]
    lines = []
    may = doubts([row for row in rows if row.severity == MAY])
    if may:
        lines.append('; '.join([
            f'what differs from the run that wrote {path}, and may change bits: {_first(may)}',
            *_measurements(rows, MAY)]))
    if serious:
        lines.append(inexact(
            f'This run differs from the one that wrote {path}:\n{table(serious)}\n'
            + ''.join(f'{text}\n' for text in _measurements(rows, CHANGES))
            + (_RESTORED if any(map(_is_restored, serious)) else ''), strict,
            'Put the settings back; or begin a new run from these weights: load_from=..., '
            'resume=False'))
    if harmless:
        lines.append('different from the resumed run, without effect on its bits: '
                     f'{_first(harmless)}')
    return lines


def _measurements(rows: Sequence[FactDifference], severity: str) -> list[str]:
    """Return the measurements of the versions that differ, in full: a table shortens them."""
    return [f'{row.name}: {row.consequence}' for row in rows
            if row.severity == severity and row.consequence.startswith(_MEASURED)]


def _is_restored(row: FactDifference) -> bool:
    """Whether MMEngine takes this setting from the state of an optimizer or a schedule."""
    return row.name.startswith('config.param_scheduler') or '.optimizer.' in row.name


def inexact(text: str, strict: bool, advice: str) -> str:
    """Return a warning: ``text``, and that the result may not be that of the uninterrupted run.

    It may be: a hook that differs may only log, and a checkpoint restores the learning rate
    whatever the config says.

    Raises:
        ResumeError: ``strict``; it ends with ``advice``, a sentence without its full stop.
    """
    if strict:
        raise ResumeError(f'{text}The result may not be that of the uninterrupted run. {advice}; '
                          'or accept that it may differ: randomness.resume_strict=False')
    return f'{text}The result may not be that of the uninterrupted run.'


def _text(value: Any) -> str:
    return ABSENT if value == ABSENT else repr(value)


def _from_difference(then: str, now: str) -> tuple[str, str]:
    """Cut long texts of two values to what follows shortly before they differ."""
    begin = len(os.path.commonprefix([then, now])) - 8
    if begin <= 0 or max(len(then), len(now)) <= _WIDTHS[1]:
        return then, now
    return f'...{then[begin:]}', f'...{now[begin:]}'


def _cut(text: str, width: int) -> str:
    return text if len(text) <= width else f'{text[:width // 2 - 3]}...{text[-(width // 2):]}'
