"""Code that users write has the outcome that docs/evidence/user-setups.md lists."""
import json

import pytest

from dev.user_setups import __main__ as setups
from dev.user_setups.setup import EQUAL, FOUND, REFUSED, SETUPS, Outcome, judge, train

setups.load()
# each by another part of a check: it ends the first run
FIRST = {
    'PaletteOfTheModule': 'earlier samples have left in dev.user_setups.samples.PALETTE',
    'NumberOfTheWorker': 'the number of the process or worker',
    'CachesWhatItLoaded': 'epoch 1',
    'LargestImageSoFar': 'as another process collates it',
    'RotatesByPass': 'Earlier passes have changed passes',
    'PermutationFromEntropy': 'computed twice from the same random numbers',
    'ShuffledList': 'the dataset ShuffledList was built twice',
    'WeightsFromEntropy': 'the model WeightsFromEntropy was built twice',
    'CachedDrawPerClass': 'dev.user_setups.steps.first_of',
    # the repeated step that has other bits without the attribute: 1, 2, 4, 8, ..., counted from 0
    'AfterAWarmUp': 'resumes at iteration 7 would take another step. Steps have changed '
                    'attributes that reach the loss and that no checkpoint keeps: model.steps',
    'CountedSteps': 'reach the loss and that no checkpoint keeps: model.steps',
    'GeneratorMadeInAStep': 'reach the loss and that no checkpoint keeps: model.rng',
    'SmallestLoss': 'model.smallest',
    'InitializedFromData': 'model.centre',
    'RefreshedEveryFive': 'model.target',
    'NumberOfTheProcessInAStep': 'its bits differ',
    'FreezesItsBackboneToPredict': 'frozen.backbone.0.weight',
    'ActivationMaps': 'the gradient of backbone.0.weight',
    'MoreThreadsToPredict': 'the number of threads (1 -> 2)',
    'AdaptsStatisticsToTheTestSet': 'backbone.1.running_mean',
    'MeasuresInDoublePrecision': 'the default dtype (torch.float32 -> torch.float64)',
}
NO_ALARM = ('StateDictHooks', 'OldSpectralNorm', 'ReplacesTheHeadAtTheStart',
            'a_partial_as_collate', 'CacheOfGrids', 'ExtraState', 'RegisteredAttribute',
            'WeightOfTheLossByEpoch')
NAMED = {'ClockOnce': 'differs in model.phase',
         'metric_that_balances_losses': 'validations.WEIGHTS'}


@pytest.mark.parametrize('name', [*FIRST, *NO_ALARM])
def test_a_self_check_ends_the_first_run_and_not_what_repeats(name, tmp_path):
    ran = train(name, str(tmp_path), None, True)
    assert (ran.by, FIRST[name] in ran.error) == (FOUND, True) if name in FIRST else (
        not ran.error), ran.error


@pytest.mark.parametrize('name', NAMED)
def test_a_warning_names_the_code(name, tmp_path):
    ran = train(name, str(tmp_path), None, True)
    assert not ran.error
    assert any(NAMED[name] in line for line in ran.log.splitlines() if 'WARNING' in line)


@pytest.mark.parametrize(('name', 'outcome'), [
    ('other_labels', REFUSED), ('SwitchesThePipelineOnce', REFUSED),
    ('copy_without_the_last_checkpoints', EQUAL)])
def test_what_a_resume_says(name, outcome):
    assert judge(name).outcome == outcome


@pytest.mark.nightly
@pytest.mark.parametrize('name', SETUPS)
def test_every_set_up(name):
    recorded = Outcome(*json.loads(setups.RESULTS.read_text())[name])
    assert judge(name).outcome == recorded.outcome
