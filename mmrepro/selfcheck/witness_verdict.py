"""Compare the notes of a run and its witness; name the first difference and what to do."""
from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterable, Mapping, Sequence, Set
from typing import Any, NamedTuple

from ..errors import FingerprintError
from ..fingerprint.divergence import (
    ComparedField,
    Divergence,
    differing_names,
    divergences,
    paired_validations,
)
from ..fingerprint.reader import RankLog, read_files
from ..util.files import read_json
from ..util.text import encoded, listed
from .witness_process import files_of

LINES = re.compile(r'witness\.rank(\d+)\.jsonl')
FILE = 'witness.rank{}.jsonl'
ITEMS = 'items'  # of a line: digests of the parts of the batch, by path
ATTRIBUTES = 'attributes.json'  # digests of a witness' attributes before an iteration, by path
ATTRIBUTES_AFTER = 'attributes_after.json'  # the same, after the iterations that are compared
LEFT = 'left.json'  # names of those that loading samples has changed in a witness
PREDICTIONS = 'predictions'  # of a line of a validation: digests of its first batches
# paths of attributes: of data loading, and of globals (``module:name``)
OF_LOADING = re.compile(r'(len\()?(dataset\b|collate_fn\b|[\w.]+:)')
# samplers run ahead where there are workers, of which a witness has another number
OF_SAMPLERS = re.compile(r'(len\()?(batch_)?sampler\b')
TRUNCATED = 'truncated'  # of a line of a validation: not all batches were predicted
SHOWN = 5  # names in a message
SHOWN_ITERATIONS = 12

# A difference counts if one of these differs: what no training reads changes none of them.
EFFECTS = ('gradients', 'buffers', 'lr', 'optimizer', 'parameters', 'averages')


class Finding(NamedTuple):
    """The first difference that matters."""
    text: str  # where, and both values
    field: str  # a key of ``schema.FIELDS``, or 'validation'
    names: tuple[str, ...]  # of parts that differ: of the batch, or of the field
    lost: tuple[str, ...] = ()  # attributes that are as they were when the run began
    other: tuple[str, ...] = ()  # other attributes that differ before the iteration
    left: tuple[str, ...] = ()  # attributes in which samples leave something for later ones

    @property
    def of_batch(self) -> bool:
        return self.field.startswith('batch')


def noted_lines(folder: str) -> dict[int, RankLog]:
    """Return rank -> lines of the witness records in a folder."""
    return read_files(folder, LINES)


def metrics_of(noted: Mapping[int, RankLog]) -> dict[int, list[dict[str, str]]]:
    """Return the metrics of validations of rank 0, by iteration and in order."""
    metrics: dict[int, list[dict[str, str]]] = {}
    for val in noted[0].vals if 0 in noted else ():
        metrics.setdefault(val['iteration'], []).append(val['metrics'])
    return metrics


def compare(run: str, witness: str, begin: int, until: int,
            attributes: Mapping[int, Mapping[str, str]] = {}) -> Finding | None:
    """Return the first difference that matters between the lines in two folders.

    Args:
        attributes: of the run, by iteration; the first are those at its start.
        begin: the first iteration that is compared, counted from 0.
        until: the iteration before which the comparison ends.

    Raises:
        FingerprintError: a file cannot be read, or one of these iterations was not noted.
    """
    ours, theirs = ({rank: log._replace(steps={
        iteration: step for iteration, step in log.steps.items() if begin <= iteration < until})
        for rank, log in noted_lines(folder).items()} for folder in (run, witness))
    for side, folder in ((ours, run), (theirs, witness)):
        # a comparison of nothing would find no difference
        missing = [i for i in range(begin, until) if 0 not in side or i not in side[0].steps]
        if missing:
            raise FingerprintError(f'{folder}: iteration {missing[0]} was not noted, of {begin} to '
                                   f'{until - 1}')
    lost, other = _attributes(attributes, witness, begin)
    found = next(filter(None, map(_relevant, divergences(ours, theirs))), None)
    if found is None:
        finding = _validation(ours, theirs, begin, until)
        return finding._replace(lost=lost, other=other) if finding else None
    rank, field = found.rank, found.field
    first, second = (side[rank].steps[found.iteration] for side in (ours, theirs))
    names = tuple(sorted(field.names, key=lambda name: ':' not in name))  # attributes first
    if field.field.startswith('batch.'):
        names = differing_names(first.get(ITEMS, {}), second.get(ITEMS, {}))
    return Finding(found.text(), field.field, names, lost, other)


def _relevant(divergence: Divergence) -> Divergence | None:
    """Return a divergence without numbers that are only logged; None if it has no effect."""
    ranks = {rank: tuple(filter(None, map(_without_logged, fields)))
             for rank, fields in divergence.ranks.items()}
    matters = any(field.field in EFFECTS for fields in ranks.values() for field in fields)
    return Divergence(divergence.iteration, ranks) if matters else None


def _without_logged(field: ComparedField) -> ComparedField | None:
    """Return the losses without numbers that MMEngine does not add to the loss."""
    if field.field != 'losses':
        return field
    names = tuple(name for name in field.names if 'loss' in name)
    return field._replace(names=names) if names else None


def _validation(ours: Mapping[int, RankLog], theirs: Mapping[int, RankLog], begin: int,
                until: int) -> Finding | None:
    for rank in sorted(ours.keys() & theirs.keys()):
        # backwards: where it resumes, a witness makes the validation of its loop, the last one
        pairs = [*paired_validations(reversed(ours[rank].vals), reversed(theirs[rank].vals))]
        for first, val in reversed(pairs):
            if not begin <= val['iteration'] <= until:
                continue
            finding = _differing_validation(first, val)
            if finding is not None:
                return finding
    return None


def _differing_validation(first: Mapping[str, Any], second: Mapping[str, Any]) -> Finding | None:
    where = f'the validation at iteration {first["iteration"]}'
    for number, (a, b) in enumerate(zip(first.get(PREDICTIONS, []), second.get(PREDICTIONS, []))):
        if a != b:
            return Finding(f'{where}, predictions of batch {number}: {a} and {b}', 'validation', ())
    names = () if second.get(TRUNCATED) else differing_names(first['metrics'], second['metrics'])
    if not names:
        return None
    values = [side['metrics'].get(names[0]) for side in (first, second)]
    shown = ' and '.join(_number(value) for value in values)
    return Finding(f'{where}, metric {names[0]}: {shown}', 'validation', names)


def _number(value: str | None) -> str:
    return 'nothing' if value is None else repr(float.fromhex(value))


def attribute_digests(texts: Mapping[str, str]) -> dict[str, str]:
    """Return digests of attributes, by path: files of a witness hold no value of the user's."""
    return {name: hashlib.blake2b(encoded(text), digest_size=8).hexdigest()
            for name, text in texts.items()}


def _attributes(noted: Mapping[int, Mapping[str, str]], witness: str, begin: int
                ) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the attributes that a witness has otherwise: as at the start of the run, and others.
    """
    path = os.path.join(witness, ATTRIBUTES)
    if begin not in noted or not os.path.exists(path):
        return (), ()
    start, now = attribute_digests(noted[min(noted)]), attribute_digests(noted[begin])
    theirs = read_json(path, FingerprintError)
    differing = [name for name in {**now, **theirs}
                 if now.get(name) not in (theirs.get(name), start.get(name))]
    lost = tuple(name for name in differing if theirs.get(name) == start.get(name))
    return lost, tuple(name for name in differing if name not in lost)


def not_restored(noted: Mapping[int, Mapping[str, str]], witness: str, begin: int,
                 of_a_process: Set[str], after: Mapping[str, str] | None = None) -> list[str]:
    """Return attributes that the run has changed and that a resumed run has otherwise.

    Those of data loading are left out: caches differ from worker to worker, and what samples depend
    on is compared. Those of samplers count if they have the value of the start of the run again.

    Args:
        of_a_process: names of attributes that each process has otherwise, such as times.
        after: attributes of the run after the iterations that the witness has trained. What is
            equal there was set again, such as a rate of dropout that follows from the iteration.
    """
    lost, other = _attributes(noted, witness, begin)
    path = os.path.join(witness, ATTRIBUTES_AFTER)
    still = {*lost, *other}
    if after is not None and os.path.exists(path):
        still = set(differing_names(attribute_digests(after), read_json(path, FingerprintError)))
    names = [*lost, *(name for name in other if not OF_SAMPLERS.match(name))]
    return [name for name in names
            if name in still and name not in of_a_process and not OF_LOADING.match(name)]


def without_parts(names: Iterable[str]) -> list[str]:
    """Return the names of attributes without what is said of their parts.

    >>> without_parts(['len(Patience.values)', 'Patience.values[1]', 'Patience.seen'])
    ['Patience.values', 'Patience.seen']
    """
    return list(dict.fromkeys(name.removeprefix('len(').removesuffix(')').partition('[')[0]
                              for name in names))


def of_a_process(noted: Mapping[int, Mapping[str, str]], witness: str, begin: int) -> set[str]:
    """Return the names of attributes that another process has otherwise when a run begins."""
    path = os.path.join(witness, ATTRIBUTES)
    if begin not in noted or not os.path.exists(path):
        return set()
    return set(differing_names(attribute_digests(noted[begin]), read_json(path, FingerprintError)))


def left_between(before: Mapping[str, str], after: Mapping[str, str]) -> list[str]:
    """Return the attributes of data loading, and globals, that loading samples has changed."""
    return [name for name in after if before.get(name) != after[name] and OF_LOADING.match(name)]


def left_behind(witness: str) -> tuple[str, ...]:
    """Return the names of attributes that loading samples has changed in a witness."""
    path = os.path.join(witness, LEFT)
    return tuple(read_json(path, FingerprintError)) if os.path.exists(path) else ()


# ------------------------------------------------------------------------------------ messages

OFF = ("To train on with a warning: randomness.self_checks=dict(witness='warn'); without a "
       'witness: dict(witness=False)')
REGISTER = "register it: mmrepro.keep_attributes(Class, 'attribute')"
OF_MODELS = ('no checkpoint holds what this depends on: keep it in a buffer (register_buffer), '
             'make a module that is held elsewhere a submodule, compute it from the iteration, or '
             f'{REGISTER}. What a hook changes in before_train_epoch it changes again where an '
             'epoch is resumed: let it do so in before_train_iter, where batch_idx == 0')
# field that differs first -> what to do, of a resumed run
ADVICE = {
    'batch': 'the dataset, a transform or the sampler depends on what was loaded before, or on '
             'what a hook has set: compute it when the dataset is built, or from the sample and '
             f'the epoch; let a hook set it in each epoch, not in one; or {REGISTER}',
    'lr': 'a schedule or hook has set it earlier and does not set it again: let it follow from '
          'the iteration, or keep it in state_dict()',
    'optimizer': 'the state of the optimizer goes to other parameters, or is not in its '
                 'state_dict(): build groups of parameters in an order of their own, not in that '
                 'of a set; keep state in optimizer.state',
    'averages': f'an average has state that is neither parameter nor buffer: {REGISTER}',
    'validation': 'predictions or metrics depend on what the checkpoint does not hold: of '
                  f'averages, metrics and hooks, {REGISTER}; or on the number of workers that load '
                  'the validation data, which differs in the witness: compute a sample from its '
                  'index only. A metric that measures time differs in every run: log it by a hook; '
                  'one that follows the order of a set differs in every process: sort it',
}


def resumed_text(finding: Finding, others: Sequence[Finding | str | None], iteration: int,
                 work_dir: str) -> str:
    """Return the message for a resume that is not the run of a work directory.

    Args:
        others: what a further process found that loads with as many workers as the run, if there
            was one.
    """
    if [*others] == [None]:
        return '\n'.join([workers_text(finding, iteration), OFF])
    finding = next((other for other in others if isinstance(other, Finding)), finding)
    lines = [f'A run that resumes at iteration {iteration} is not this run: a second process has '
             'resumed from its checkpoint and got different bits.', advice_text(finding)]
    files = files_of(work_dir).own
    if files:
        lines.append(
            f'It had copies of {listed(files, SHOWN)} in the work directory, as they are now. If '
            'training reads a file that is written again later, write a new one for each epoch')
    return '\n'.join([*lines, OFF])


def workers_text(finding: Finding, iteration: int) -> str:
    """Return the message for a resume that is the run with as many workers as it only."""
    return '\n'.join([
        'This run depends on the number of workers: a second process has resumed from its '
        f'checkpoint of iteration {iteration} with another number and got different bits; with '
        'as many as the run, it got the same.',
        f'first difference: {finding.text} (the run, the witness)',
        *_parts(finding._replace(left=())),
        'to do: workers load ahead, from what they were started with. What a hook sets for '
        'samples in a variable of a module or of the environment, in a file or in MessageHub '
        'reaches them late or never: set an attribute of the dataset or of a transform, with '
        'which workers start again, or compute it from the epoch'])


def not_restored_text(names: Sequence[str], iteration: int, compared: int) -> str:
    """Return the warning about state that a resume does not restore."""
    return (f'A resume at iteration {iteration} does not restore {listed(names, SHOWN)}. The '
            f'{compared} compared iterations do not depend on them. If later ones do, {REGISTER}; '
            'what is only logged needs nothing')


def iterations(numbers: Sequence[int]) -> str:
    """Return 'iteration 10', or 'iterations 10, 500' and the first others."""
    noun = 'iteration' if len(numbers) == 1 else 'iterations'
    return f'{noun} {listed([*map(str, numbers)], SHOWN_ITERATIONS)}'


def edited_text(names: Sequence[str]) -> str:
    """Return that another process does not have the code of the run."""
    return f'code of this run was edited: {listed(names, SHOWN)}'


def advice_text(finding: Finding, edited: Sequence[str] = ()) -> str:
    """Return the first difference between a run and its resumed run, and what to do.

    ``edited``: own files that have changed since the run.
    """
    lines = [f'first difference: {finding.text} (the run, the witness)', *_parts(finding)]
    if edited:
        return '\n'.join([*lines, f'{edited_text(edited)} since it trained',
                          'to do: put the code of the run back, and verify once more'])
    if finding.lost:
        lines.append('This run has changed these since its start, and the resumed run has their '
                     f'initial values: {listed(finding.lost, SHOWN)}')
    elif finding.other:
        lines.append(f'Before that iteration they differ in {listed(finding.other, SHOWN)}')
    advice = ADVICE.get(finding.field.partition('.')[0], OF_MODELS)
    return '\n'.join([*lines, f'to do: {advice}'])


def _parts(finding: Finding) -> list[str]:
    if finding.of_batch and finding.left:
        return [f'parts that differ: {listed(finding.names, SHOWN)}',
                f'samples leave something for later ones in {listed(finding.left, SHOWN)}']
    return [f'parts that differ: {listed(finding.names, SHOWN)}'] if finding.names else []


def repeated_text(finding: Finding, others: list[Finding | str | None], until: int
                  ) -> tuple[str, bool]:
    """Return the message for a repetition that is not the run, and whether that is certain.

    Args:
        others: what two further processes found that load with as many workers as the run, in
            comparison with the run, and a comparison of these two; fewer, where one of them was
            not compared.
    """
    where = [f'first difference: {finding.text} (the run, the witness)', *_parts(finding)]
    if len(others) < 3:
        return '\n'.join([
            'A second process that trains the first iterations of this run with another number of '
            'workers got different bits.', *where,
            'Two more processes, which would tell why, were not compared; mmrepro verify '
            'WORK_DIR tries again']), False
    first, second, each_other = others
    if first is None and second is None:
        return '\n'.join([
            'This run depends on the number of workers: a second process has trained its first '
            'iterations with another number and got different bits.', *where,
            'to do: state that the dataset, a transform or the collate function keeps between '
            'samples differs between workers: compute it when the dataset is built, or from the '
            'sample alone', OFF]), True
    if each_other is not None:
        return '\n'.join([
            f'This run cannot be repeated: each process that trains its first {until} iterations '
            'gets different bits.', *where,
            'to do: look for a clock, entropy, an unseeded generator, a process id, the work '
            'directory, an address or the order of a set in what is named above, and in the code '
            'that builds it', OFF]), True
    return '\n'.join([
        'This run is not what its config trains: two other processes that were built from the '
        'config agree, and this one has different bits.', *where,
        'Its script may change model, data or hooks after the runner was built; code that ran '
        'before may have left something behind; or the run depends on what changes rarely (a '
        'clock of hours, the date, a file). A start of the same script may repeat it; this was '
        'not proved']), False
