"""A queue of jobs starts one line again and again: its own checkpoint first, else the weights."""
import pytest
import torch
from mmengine.runner import Runner
from small_runs import config, hook_with, small_run, trained_runner

from mmrepro.errors import ConfigError


@pytest.fixture(scope='module')
def files(tmp_path_factory):
    """Paths of a checkpoint of another training, and of its weights."""
    folder = tmp_path_factory.mktemp('pretrained')
    model = trained_runner(config(folder)).model
    torch.save(dict(state_dict=model.state_dict(), meta={}), folder / 'weights.pth')
    return {'training': str(folder / 'epoch_2.pth'), 'weights': str(folder / 'weights.pth')}


def job(work_dir, resume, load_from, epochs=2, stop=None):
    """Return the first iteration, the weights before it, and the warnings of a run."""
    seen = []

    def look(runner, batch_idx, data_batch=None):
        if runner.iter == stop:
            raise KeyboardInterrupt
        seen.append((runner.iter, runner.model.line.weight.detach().clone()))

    runner = Runner.from_cfg(small_run(
        work_dir, resume=resume, load_from=load_from,
        train_cfg=dict(by_epoch=True, max_epochs=epochs)))
    runner.register_hook(hook_with(before_train_iter=look))
    lines = [*runner.lifecycle.resume.passed_over]
    try:
        runner.train()
    except KeyboardInterrupt:
        pass
    return (*(seen[0] if seen else (None, None)), lines)


def pretrained(files):
    return torch.load(files['weights'])['state_dict']['line.weight']


@pytest.mark.parametrize('kind, resume', [('training', 'auto'), ('weights', 'auto'),
                                          ('weights', True)])
def test_jobs_begin_with_the_weights_go_on_and_say_that_they_are_done(kind, resume, files,
                                                                      tmp_path):
    first, weight, said = job(tmp_path, resume, files[kind], stop=5)
    assert first == 0 and torch.equal(weight, pretrained(files))
    assert len(said) == 1 and 'starts from' in said[0]
    first, _, said = job(tmp_path, resume, files[kind])
    assert first == 5 and said == [
        f'load_from={files[kind]} is not loaded: {tmp_path} has a checkpoint of this run. To '
        'begin with that file again, give another work_dir']
    if resume == 'auto':
        first, _, said = job(tmp_path, resume, files[kind])
        assert first is None and 'nothing is left to train: ' in said[-1]
        assert said[-1].endswith('iter_8.pth was written at iteration 8, and max_epochs=2')


def test_true_resumes_a_checkpoint_of_another_work_dir_and_then_its_own(files, tmp_path):
    first, _, said = job(tmp_path, True, files['training'], epochs=4, stop=10)
    assert first == 8 and not said
    first, _, said = job(tmp_path, True, files['training'], epochs=4)
    assert first == 10 and 'is not loaded' in said[0]
    # an older one of its own that was named
    first, _, said = job(tmp_path, True, str(tmp_path / 'iter_9.pth'), epochs=4)
    assert first == 9 and not said


def test_a_finished_run_does_not_stand_before_a_named_checkpoint(files, tmp_path):
    job(tmp_path, True, files['training'], epochs=3)
    first, _, said = job(tmp_path, True, files['training'], epochs=3)
    assert first == 8 and not said


def test_other_values_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="resume='latest': allowed are True, False and 'auto'"):
        Runner.from_cfg(small_run(tmp_path, resume='latest'))
