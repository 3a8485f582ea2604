"""What a training starts from is decided by its seed and its checkpoint, or refused by name."""
import os
import re
import shutil
import sys
from types import ModuleType

import mmengine.config.config
import pytest
import small_runs
import torch
from counted import Counted
from faults import tiny
from harness import Child
from mmengine.config import Config
from mmengine.dataset import pseudo_collate
from mmengine.registry import DATASETS, MODELS
from mmengine.runner import Runner
from small_runs import (
    NoisyLine,
    Points,
    config,
    finish,
    small_run,
    warnings_of,
    weights_of,
)
from unformatted import formatted

import mmrepro
from mmrepro import on_virtual_ranks
from mmrepro.errors import RandomnessError, ResumeError
from mmrepro.objects.digests import state_digest
from mmrepro.run import identity

pytestmark = pytest.mark.usefixtures('no_pause_between_passes')

LOOPS = {'epochs': dict(by_epoch=True, max_epochs=2),
         'iterations': dict(by_epoch=False, max_iters=8, val_interval=100)}


@MODELS.register_module(force=True)
class ZeroLine(NoisyLine):
    def __init__(self):
        super().__init__()
        self.init_cfg = dict(type='Constant', layer='Linear', val=0, bias=0)


@DATASETS.register_module(force=True)
class CountedPoints(Points):
    built = 0

    def __init__(self):
        CountedPoints.built += 1


def validating(work_dir, loop='epochs', **changes):
    cfg = small_run(work_dir, train_cfg=dict(LOOPS[loop]), **{'model.type': 'ZeroLine', **changes})
    return small_runs.validating(cfg, phases=('val', 'test'))


@pytest.mark.parametrize('what', ['val', 'test'])
def test_a_validation_alone_leaves_the_training_data_on_disk(what, tmp_path):
    cfg = validating(tmp_path, **{'train_dataloader.dataset.type': 'CountedPoints'})
    runner = Runner.from_cfg(cfg)
    CountedPoints.built = 0
    getattr(runner, what)()
    assert CountedPoints.built == 0 and runner.iter == runner.epoch == 0
    runner.train()
    assert CountedPoints.built == 1 and runner.iter == 8


BEFORE = {'val': lambda runner: runner.val(), 'test': lambda runner: runner.test(),
          'a look at the loop': lambda runner: (len(runner.train_dataloader), runner.train_loop)}


@pytest.mark.parametrize('before', BEFORE)
@pytest.mark.parametrize('loop, resume', [('epochs', True), ('iterations', True),
                                          ('epochs', False)])
def test_what_comes_before_a_training_changes_nothing(loop, resume, before, tmp_path):
    """One that is resumed, and one that starts from the weights of a checkpoint."""
    cfg = validating(tmp_path, loop, custom_hooks=[dict(type='EMAHook')])
    expected = finish(cfg)
    cfg.resume, cfg.load_from = resume, str(tmp_path / 'iter_3.pth')
    cfg.work_dir = str(tmp_path / 'from')
    expected = expected if resume else finish(cfg)
    runner = Runner.from_cfg(cfg)
    BEFORE[before](runner)
    runner.train()
    assert weights_of(runner) == expected


def interrupted(cfg):
    """Return a runner that was interrupted once, in its fifth iteration."""
    armed = [True]

    def press_ctrl_c(runner, **kwargs):
        if runner.iter == 4 and armed:
            armed.clear()
            raise KeyboardInterrupt

    runner = Runner.from_cfg(cfg)
    runner.register_hook(small_runs.hook_with(after_train_iter=press_ctrl_c))
    with pytest.raises(KeyboardInterrupt):
        runner.train()
    return runner


@pytest.mark.parametrize('loop', LOOPS)
def test_a_training_that_was_interrupted_is_not_begun_again(loop, tmp_path):
    runner = interrupted(validating(tmp_path, loop))
    with pytest.raises(ResumeError, match='iteration 4.*resume=True'):
        runner.train()
    assert runner.iter == 4
    resumed = finish(validating(tmp_path, loop, resume=True))
    assert resumed == finish(validating(tmp_path / 'whole', loop))


def test_who_accepts_another_result_may_begin_again(tmp_path):
    runner = interrupted(validating(tmp_path, **{'randomness.resume_strict': False}))
    assert sum('cannot go on' in text for text in warnings_of(runner)) == 1 and runner.epoch == 2


@pytest.mark.parametrize('loop', LOOPS)
def test_a_training_that_is_over_may_be_asked_for_again_but_not_for_more(loop, tmp_path):
    runner = small_runs.trained_runner(validating(tmp_path, loop))
    before = runner.model.line.weight.clone()
    runner.train()
    assert torch.equal(before, runner.model.line.weight)
    more = dict(epochs=('_max_epochs', 3), iterations=('_max_iters', 12))
    setattr(runner.train_loop, *more[loop])
    with pytest.raises(ResumeError, match='iteration 8'):
        runner.train()


@MODELS.register_module(force=True)
class HalfWritten(NoisyLine):
    """Has a parameter of which one row is written, and one that only a checkpoint writes."""

    def __init__(self, forgets='row'):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.empty(2, 3))
        self.scale = torch.nn.Parameter(torch.Tensor(4))
        self.forgets = forgets
        with torch.no_grad():
            self.weight[0] = 1
            if forgets != 'row':
                self.weight[1] = 2

    def init_weights(self):
        super().init_weights()
        if self.forgets == 'nothing':
            torch.nn.init.ones_(self.scale)


def half_written(work_dir, forgets, deterministic=True):
    return validating(work_dir, model=dict(type='HalfWritten', forgets=forgets), randomness=dict(
        seed=3, deterministic=deterministic))


def test_weights_that_nothing_initialises_are_refused_by_name(tmp_path):
    with pytest.raises(RandomnessError, match='^weight, scale of HalfWritten: nothing has init'):
        Runner.from_cfg(half_written(tmp_path, 'row')).train()
    with pytest.raises(RandomnessError, match='^scale of HalfWritten'):
        Runner.from_cfg(half_written(tmp_path, 'scale')).train()
    runner = Runner.from_cfg(half_written(tmp_path, 'row', 'warn'))
    assert sum('weight, scale of HalfWritten' in text for text in warnings_of(runner)) == 1


def test_weights_may_come_late_from_init_weights_or_a_checkpoint(tmp_path):
    expected = finish(half_written(tmp_path, 'nothing'))
    cfg = half_written(tmp_path, 'scale')
    cfg.load_from = str(tmp_path / 'iter_8.pth')
    assert set(finish(cfg)) == set(expected)


OWN = dict(train_cfg=dict(by_epoch=True, max_epochs=1),
           optim_wrapper=dict(optimizer=dict(type='SGD', lr=0.1)))
CONDITION = 'of the script hold the same in every run'


def own_script(folder, *steps, resume=False, **randomness):
    """Do what a script does, in this order; return its log and its weights, or the error."""
    import mmrepro
    built = {}
    for step in steps:
        if step == 'model':
            built['model'] = NoisyLine()
        elif step == 'data':
            built['train_dataloader'] = torch.utils.data.DataLoader(
                Points(), batch_size=2, collate_fn=pseudo_collate)
        else:
            mmrepro.set_random_seed(step)
    settings = dict(OWN, model=dict(type=NoisyLine), work_dir=str(folder),
                    experiment_name=folder.name, train_dataloader=config(folder).train_dataloader,
                    resume=resume, randomness=dict(seed=3, **randomness))
    runner = Runner(**{**settings, **built})
    try:
        runner.train()
    except RandomnessError as error:
        return next(folder.glob('*/*.log')).read_text(), error
    return next(folder.glob('*/*.log')).read_text(), weights_of(runner)


def in_own_process(*arguments, **settings):
    return Child(own_script, *arguments, **settings).result()


@pytest.mark.parametrize('steps, says', [
    (['model'], 'NoisyLine was built before this runner has set its seed'),
    (['model', 3], 'NoisyLine was built before mmrepro.set_random_seed(3) was called'),
    ([7, 'model'],
     'NoisyLine was built after mmrepro.set_random_seed(7), and randomness.seed is 3')])
def test_a_model_that_was_built_before_the_seed_is_refused(steps, says, tmp_path):
    log, error = in_own_process(tmp_path, *steps, deterministic=True)
    assert says in str(error) and 'mmrepro.set_random_seed(3) is called before' in str(error)
    assert f'if model {CONDITION} (NoisyLine was built ' in log
    log, weights = in_own_process(tmp_path / 'w', *steps)
    assert log.count(f'{says}: its initial weights') == 1 and f'if model {CONDITION}' in log


def test_a_script_that_sets_the_seed_first_gets_the_same_bits(tmp_path):
    found = [in_own_process(tmp_path / str(turn), 3, 'model', 'data', 3, deterministic=True)
             for turn in range(2)]
    assert found[0][1] == found[1][1]
    assert not any(CONDITION in log or 'initial weights' in log for log, _ in found)
    log, weights = in_own_process(tmp_path / 'dict', deterministic=True)
    assert CONDITION not in log and isinstance(weights, dict)


@pytest.mark.parametrize('steps, named', [
    (['data'], 'train_dataloader'), (['data', 3, 'model'], 'train_dataloader'),
    ([3, 'data'], '')])
def test_data_from_before_the_seed_is_a_condition_of_what_is_promised(steps, named, tmp_path):
    log, weights = in_own_process(tmp_path, *steps, deterministic=True)
    assert isinstance(weights, dict)
    assert (f'if {named} {CONDITION} (Points was built before' in log) == bool(named)


def test_weights_of_a_checkpoint_need_no_seed(tmp_path):
    _, weights = in_own_process(tmp_path, 3, 'model', deterministic=True)
    log, resumed = in_own_process(tmp_path, 'model', resume=True, deterministic=True)
    assert weights == resumed and 'initial weights' not in log


def counted_checks(cfg, check=False):
    counted = Counted()
    runner = Runner.from_cfg(cfg)
    if check:
        runner.lifecycle.restoration.read(runner.lifecycle.resume.point.path, 'cpu')
    runner.train()
    return counted.calls['check'], counted.calls['load']


def resumed(work_dir, path=None):
    return small_run(work_dir, resume=True, load_from=path and str(path),
                     **{'default_hooks.checkpoint': None})


@pytest.mark.parametrize('again', [False, True])
def test_a_resume_checks_the_checkpoint_once(again, base, tmp_path):
    """Its content is loaded twice: mapped, for the choice, and with its tensors; and the last file
    for the digests of the end."""
    cfg = resumed(tmp_path, base / 'iter_3.pth')
    assert Child(counted_checks, cfg, again).result() == (1 + again, 3 + again)


def test_an_automatic_resume_checks_each_candidate_once(tmp_path):
    finish(small_run(tmp_path))
    (tmp_path / '.last_good.pth').unlink()  # a hard link to the newest file
    (tmp_path / 'iter_8.pth').write_bytes((tmp_path / 'iter_8.pth').read_bytes()[:-9])
    # the damaged file, and the one before it
    assert Child(counted_checks, resumed(tmp_path)).result() == (2, 3)


def test_a_copied_run_leaves_the_best_checkpoint_of_the_original_alone(tmp_path):
    """CheckpointHook removes what it takes for the previous best one."""
    original, copied = tmp_path / 'original', tmp_path / 'copied'
    finish(small_run(original))
    checkpoint = torch.load(original / 'iter_3.pth', weights_only=False)
    checkpoint['message_hub']['runtime_info']['best_ckpt'] = str(original / 'best_iter_2.pth')
    torch.save(checkpoint, original / 'iter_3.pth')
    (original / 'best_iter_2.pth').write_bytes(b'best')
    (original / 'last_checkpoint').write_text(str(original / 'iter_3.pth'))
    shutil.copytree(original, copied)
    runner = small_runs.trained_runner(resumed(copied))
    assert runner.message_hub.get_info('best_ckpt') == str(copied / 'best_iter_2.pth')
    assert runner.lifecycle.resume.point.path == str(copied / 'iter_3.pth')
    assert 'copy of' in runner.lifecycle.resume.passed_over[0]


def test_a_run_publishes_its_last_checkpoint(tmp_path):
    cfg = small_run(tmp_path)
    cfg.default_hooks.checkpoint.update(published_keys=['meta', 'state_dict'], save_last=True)
    expected = finish(cfg)
    (published, ) = tmp_path.glob('iter_8-*.pth')
    content = torch.load(published, weights_only=False)
    assert set(content) == {'meta', 'state_dict'}
    assert content['state_dict']['line.weight'].numpy().tobytes() == expected['line.weight']
    runner = small_runs.trained_runner(resumed(tmp_path))
    runner.load_checkpoint(str(published))  # no state of the resumed run is taken from it


def test_weights_can_be_saved_before_the_optimizer_is_built(tmp_path):
    runner = Runner.from_cfg(small_run(tmp_path))
    runner.save_checkpoint(str(tmp_path), 'early.pth', save_optimizer=False,
                           save_param_scheduler=False)
    content = torch.load(tmp_path / 'early.pth', weights_only=False)
    assert torch.equal(content['state_dict']['line.weight'], runner.model.line.weight)
    with pytest.raises(TypeError, match='OptimWrapper'):
        runner.save_checkpoint(str(tmp_path), 'early.pth')


def test_the_text_of_the_config_is_formatted_once_for_all_checkpoints(tmp_path, monkeypatch):
    calls = []

    def as_it_is(text, **style):
        calls.append(text)
        return text, True

    monkeypatch.setattr(mmengine.config.config, 'FormatCode', as_it_is)
    finish(formatted(small_run(tmp_path)))
    assert len(list(tmp_path.glob('iter_*.pth'))) == 8
    assert 1 <= len(calls) == len(set(calls)) <= 2


@pytest.fixture
def trained(tmp_path):
    cfg = tiny.validating_and_saving(str(tmp_path / 'run'))
    cfg.log_level = 'INFO'
    cfg.custom_imports = dict(imports=['faults.tiny'])
    runner = small_runs.trained_runner(cfg)
    log, = (tmp_path / 'run').glob('*/*.log')
    return runner, log.read_text().rstrip().splitlines()[-1]


def test_it_has_the_weights_and_a_command_with_the_seed_in_effect(trained, tmp_path):
    runner, line = trained
    digest, path = re.search(r'weights ([0-9a-f]{16}) after \d+ iterations, (\S+);', line).groups()
    saved = torch.load(path, weights_only=False)['state_dict']
    assert digest == state_digest(saved)[:16]
    assert f' after {runner.iter} iterations' in line
    words = line.partition('; to repeat: ')[2].split()
    assert words[:2] == ['mmrepro', 'train'] and words[3:] == [
        '--work-dir', str(tmp_path / 'run-again')]
    assert Config.fromfile(words[2]).randomness.seed == runner.seed


TWO = '--nnodes=2 --nproc_per_node=2 --rdzv_backend=c10d --rdzv_endpoint=first'
# variables of launchers, and the arguments of torchrun for the same nodes and processes
STARTED = [
    ({}, '--nproc_per_node=4'),
    (dict(GROUP_WORLD_SIZE='1'), '--nproc_per_node=4'),
    (dict(GROUP_WORLD_SIZE='2'), TWO),
    (dict(SLURM_PROCID='0', SLURM_NNODES='2'), TWO),
    (dict(OMPI_COMM_WORLD_LOCAL_SIZE='2'), TWO),
    (dict(OMPI_COMM_WORLD_LOCAL_SIZE='3'), '--nproc_per_node=4'),  # other numbers on other nodes
    (dict(SLURM_NNODES='2'), '--nproc_per_node=4'),  # of a job whose steps have not started this
]


def test_the_command_has_the_processes_of_a_launcher_and_needs_a_config(trained, monkeypatch):
    runner, _ = trained
    monkeypatch.setattr(runner, 'cfg', Config(dict(model=dict(), launcher='pytorch')))
    # two ranks in one process
    command = on_virtual_ranks(2, lambda: identity.command_to_repeat(runner))
    assert '--nproc_per_node=1 ' in command
    monkeypatch.setattr(identity, 'process_count', lambda: 4)
    monkeypatch.setenv('MASTER_ADDR', 'first')
    for variables, said in STARTED:
        with monkeypatch.context() as env:
            for name, value in variables.items():
                env.setenv(name, value)
            # virtual ranks have as many processes as they were started with
            for command in (identity.command_to_repeat(runner), *on_virtual_ranks(
                    2, lambda: [identity.command_to_repeat(runner)])):
                assert command.startswith(f'torchrun {said} -m mmrepro train '), command
                assert command.endswith(' --launcher pytorch')
    monkeypatch.setattr(runner, 'cfg', Config(dict(randomness=dict(seed=1))))
    line = identity.outcome(runner, identity.End(dict(weights='0'), ''))
    assert line.endswith('(no command does it: the runner was built from arguments, not from a '
                         'config)')


def last_line(folder):
    log, = folder.glob('*/*.log')
    return log.read_text().rstrip().splitlines()[-1]


def test_without_a_command_that_works_the_last_line_says_why(tmp_path):
    def line_of(name, *hooks, **settings):
        cfg = small_runs.config(tmp_path / name, log_level='INFO')
        cfg.train_cfg.max_epochs = 1
        cfg.merge_from_dict(settings)
        small_runs.trained_runner(cfg, *hooks)
        return last_line(tmp_path / name)

    again = 'to repeat: start the program again, with another work_dir (no command does it: '
    assert f'{again}NoisyLine is defined in small_runs, which the config' in line_of('own_module')
    imports = dict(custom_imports=dict(imports=['small_runs']))
    assert 'to repeat: mmrepro train ' in line_of('imported', **imports)
    assert f'{again}hooks that code has registered: Hook)' in line_of(
        'hook', small_runs.hook_with(), **imports)
    cfg = small_runs.config(tmp_path / 'object', log_level='INFO', **imports)
    cfg.train_cfg.max_epochs = 1
    settings = {key: cfg[key] for key in cfg if key != 'custom_imports'}
    mmrepro.set_random_seed(cfg.randomness.seed)
    Runner(**{**settings, 'model': small_runs.NoisyLine()}, cfg=cfg).train()
    assert f'{again}model given as objects)' in last_line(tmp_path / 'object')


def test_what_an_imported_module_imports_is_known(monkeypatch):
    first, second = ModuleType('first_of_two'), ModuleType('second_of_two')
    first.second = second
    second.Own = type('Own', (), dict(__module__='second_of_two'))
    for module in (first, second):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setitem(MODELS.module_dict, 'OwnOfTwo', second.Own)
    cfg = Config(dict(model=dict(type='OwnOfTwo'), custom_imports=dict(imports='first_of_two')))
    assert identity.not_in_config(cfg) == ''
    cfg.custom_imports = dict(imports=['sys'])
    assert 'OwnOfTwo is defined in second_of_two' in identity.not_in_config(cfg)


def test_with_averages_the_last_line_has_a_digest_of_either(tmp_path):
    """As the file has them: averages in `state_dict`, trained weights in `ema_state_dict`."""
    found = []
    for number, momentum in enumerate((.1, .3)):
        cfg = tiny.validating_and_saving(str(tmp_path / str(number)))
        cfg.log_level = 'INFO'
        cfg.custom_hooks = [dict(type='EMAHook', momentum=momentum, update_buffers=True)]
        runner = small_runs.trained_runner(cfg)
        log, = (tmp_path / str(number)).glob('*/*.log')
        line = log.read_text().rstrip().splitlines()[-1]
        weights, averages, path = re.search(
            r'weights (\w{16}), averages (\w{16}) after \d+ iterations, (\S+);', line).groups()
        saved = torch.load(path, weights_only=False)
        assert averages == state_digest(saved['state_dict'])[:16]
        trained = {name[7:]: value for name, value in saved['ema_state_dict'].items()
                   if name.startswith('module.')}
        assert weights == state_digest(trained)[:16] == state_digest(
            runner.model.state_dict())[:16]
        # where the end was not saved
        os.remove(path)
        assert identity.end_of(runner).digests == dict(weights=weights, averages=averages)
        found.append((weights, averages))
    (weights, averages), (same, others) = found
    assert weights == same and averages != others


def test_a_file_of_before_the_end_is_said_to_be_one(tmp_path):
    cfg = tiny.validating_and_saving(str(tmp_path / 'run'))
    cfg.default_hooks.checkpoint = dict(
        type='CheckpointHook', by_epoch=False, interval=2, save_last=False)
    cfg.train_cfg = dict(type='IterBasedTrainLoop', max_iters=3)
    runner = small_runs.trained_runner(cfg)
    end = identity.end_of(runner)
    assert end.digests == dict(weights=state_digest(runner.model.state_dict())[:16])
    assert f'after 3 iterations, not saved (last file: {tmp_path}/run/iter_2.pth)' in \
        identity.outcome(runner, end)


@pytest.mark.parametrize('averaged', [False, True])
@pytest.mark.parametrize('value', [float('inf'), float('nan')])
def test_weights_that_are_not_finite_are_named(value, averaged, tmp_path):
    """Masks in buffers are not: they may hold what they like."""
    cfg = tiny.validating_and_saving(str(tmp_path / 'run'))
    cfg.custom_hooks += [dict(type='EMAHook')] * averaged
    runner = small_runs.trained_runner(cfg)
    runner.model.head.temperature.fill_(value)
    assert 'inf or NaN' not in identity.outcome(runner, identity.end_of(runner))
    with torch.no_grad():
        runner.model.head.fc.bias[1] = value
    runner.save_checkpoint(runner.work_dir, 'iter_8.pth', by_epoch=False, meta=dict(
        epoch=runner.epoch, iter=runner.iter))
    for saved in (True, False):
        if not saved:
            os.remove(os.path.join(runner.work_dir, 'iter_8.pth'))
        assert '; these parameters hold inf or NaN: head.fc.bias; ' in identity.outcome(
            runner, identity.end_of(runner))


def test_a_training_that_diverges_ends_with_a_warning(tmp_path):
    cfg = tiny.validating_and_saving(str(tmp_path / 'run'))
    cfg.log_level = 'INFO'
    cfg.optim_wrapper.optimizer.lr = 1e30
    small_runs.trained_runner(cfg)
    log, = (tmp_path / 'run').glob('*/*.log')
    last = log.read_text().rstrip().splitlines()[-1]
    assert 'WARNING' in last and 'these parameters hold inf or NaN: backbone.0.weight, ' in last
