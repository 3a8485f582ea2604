"""Code that users write has the outcome that docs/evidence/user-setups.md lists."""
import json
from collections import Counter

import pytest
from mmengine.hooks import Hook

from dev.user_setups import __main__ as setups
from dev.user_setups.report import write
from dev.user_setups.setup import (
    FOUND,
    GOOD,
    IN_DOUBT,
    NEEDLESS,
    REFUSED,
    SETUPS,
    Outcome,
    Setup,
    change_of,
    hook,
    judge,
    train,
)
from mmrepro.errors import ResumeError

pytestmark = pytest.mark.copies

setups.load()
# each by another part of a check: it ends the first run
FIRST = {
    'CountedSteps': 'reach the loss and that no checkpoint keeps: model.steps',
    'GeneratorMadeInAStep': 'reach the loss and that no checkpoint keeps: model.rng',
    'NumberOfTheProcessInAStep': 'its bits differ',
    'FreezesItsBackboneToPredict': 'frozen.backbone.0.weight',
    'ActivationMaps': 'the gradient of backbone.0.weight',
    'AdaptsStatisticsToTheTestSet': 'backbone.1.running_mean',
}
NO_ALARM = ('StateDictHooks', 'OldSpectralNorm', 'CacheOfGrids', 'WeightOfTheLossByEpoch',
            'MoreThreadsToPredict')
NIGHTLY = ('ReplacesTheHeadAtTheStart', 'a_partial_as_collate', 'ExtraState', 'RegisteredAttribute',
           'MeasuresInDoublePrecision')  # no alarm either


@pytest.mark.parametrize('name', [*FIRST, *NO_ALARM, *(
    pytest.param(name, marks=pytest.mark.nightly) for name in NIGHTLY)])
def test_a_self_check_ends_the_first_run_and_not_what_repeats(name, tmp_path):
    ran = train(name, str(tmp_path), 'again', True)  # without a witness, which takes longer
    assert (ran.by, FIRST[name] in ran.error) == (FOUND, True) if name in FIRST else (
        not ran.error), ran.error


def test_a_resume_with_edited_code_is_refused():
    assert judge('other_activation').outcome == REFUSED  # more resumes: every set-up, below


@hook
class Refuses(Hook):
    """Ends a resume as a rule of mmrepro that is not exact, unless the switch is off."""
    text = 'This does not fit.'

    def before_train(self, runner):
        if runner.repro.resume_strict and runner.iter:
            raise ResumeError(self.text)


@hook
class RefusesInDoubt(Refuses):
    text = 'This may not fit. Go on: randomness.resume_strict=False'


@hook
class RefusesWithReason(Refuses):
    """What it refuses would train differently."""

    def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None):
        if 'resumed' in runner.work_dir:
            runner.model.head.fc.weight.data.mul_(.9)


@pytest.mark.parametrize(('cls', 'outcome'), [
    (Refuses, NEEDLESS), pytest.param(RefusesInDoubt, IN_DOUBT, marks=pytest.mark.nightly),
    pytest.param(RefusesWithReason, REFUSED, marks=pytest.mark.nightly)])
def test_a_refusal_of_equal_bits_is_reported(cls, outcome, monkeypatch):
    def change(cfg):
        change_of(cls)(cfg)
        cfg.randomness.self_checks.witness = False  # it resumes, too

    monkeypatch.setitem(SETUPS, 'planted', Setup('planted', change, ('resumed at 3', )))
    assert judge('planted') == Outcome(outcome, 'resumed at 3', f'ResumeError: {cls.text}')


@pytest.mark.nightly  # tests/selfcheck/test_witness.py has what a witness names in less time
@pytest.mark.parametrize(('name', 'lost'), [
    ('PaletteOfTheModule', 'dev.user_setups.samples:PALETTE')])
def test_a_witness_knows_classes_of_set_ups_and_names_what_they_lose(name, lost, tmp_path):
    ran = train(name, str(tmp_path), None, True)
    assert (ran.by, lost in ran.error) == (FOUND, True), ran.error


@pytest.mark.nightly
@pytest.mark.parametrize('name', SETUPS)
def test_every_set_up(name):
    known = json.loads(setups.RESULTS.read_text())
    allowed = [Outcome(*known[name]).outcome] if name in known else GOOD
    assert judge(name).outcome in allowed


def test_the_page_has_the_results_and_no_path_of_a_run():
    outcomes = {name: Outcome(*row) for name, row in json.loads(setups.RESULTS.read_text()).items()}
    page = setups.PAGE.read_text(encoding='utf-8')
    assert page == write(outcomes)
    said = ' '.join(outcome.says for outcome in outcomes.values())
    assert not any(f'/{folder}/' in said for folder in ('tmp', 'home', 'root', 'work'))
    counts = Counter(outcome.outcome for outcome in outcomes.values())
    assert {*counts} <= {*GOOD}
    index = setups.PAGE.with_name('index.md').read_text(encoding='utf-8')
    assert (f'{len(outcomes)} set-ups: what differs is found, refused or named<br>of the refused '
            f'resumes, {counts[IN_DOUBT]} would be equal |') in index
