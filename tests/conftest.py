"""Pins the number of threads before torch is imported; times modules, and runs slow ones first."""
import json
import os
import re
import signal
import sys
from collections import Counter, defaultdict
from pathlib import Path
from types import SimpleNamespace

import one_thread  # noqa: F401  before torch

# isort: split
for variable in ('COLUMNS', 'LINES'):  # readline, which pytest loads, gives them to its processes
    os.environ.pop(variable, None)

import pytest  # noqa: E402

import mmrepro  # noqa: E402  mmcv-lite has operators from here on

# module -> seconds of processor time that its tests take, without the nightly ones; written by
#   bash tools/test.sh [tests/PATH] --write-durations
DURATIONS = Path(__file__).with_name('durations.json')
SLOW = 5  # seconds: `tools/test.sh --quick` leaves out such modules, but for tests marked `smoke`


SIGNALS = signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGINT


def _module(path):
    """Return the path of a test module below this folder, or '' for one elsewhere."""
    folder = Path(__file__).parent
    return path.relative_to(folder).as_posix() if path.is_relative_to(folder) else ''


def pytest_addoption(parser):
    parser.addoption('--write-durations', action='store_true',
                     help=f'keep the processor time of the modules that ran in {DURATIONS.name}')


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Mark the slow modules. The longest come first, so that none is left for one process."""
    seconds = json.loads(DURATIONS.read_text())
    names = [_module(item.path) for item in items]
    counts = Counter(names)
    for item, name in zip(items, names):
        if seconds.get(name, 0) > SLOW:
            item.add_marker(pytest.mark.slow)
            item.add_marker(pytest.mark.filterwarnings('ignore'))  # of libraries that train
    order = {name: (-seconds.get(name, 0), -count, name) for name, count in counts.items()}
    items[:] = [item for _, item in sorted(zip(names, items), key=lambda pair: order[pair[0]])]
    _clock[0] = _processor_time()  # without the imports of all modules


def _processor_time():
    """Return the seconds of this process and of those that it started and has waited for."""
    return sum(os.times()[:4])


_clock = [_processor_time()]  # when the last phase of a test ended
_seconds = Counter()  # of processor time, by module


# Collecting imports all test modules, and dev/ with some. To a run that a test starts these are own
# code, of which it keeps copies, and their registered classes are imported by its witness: seconds
_OF_FEW = 'dev', 'benchmarks'
_NAMES_THEM = re.compile(r'\b(from|import) ({0})\b|\b({0})\.\w'.format('|'.join(_OF_FEW)))
_IMPORTED_TEST = re.compile(r'^ *(?:from|import) (?:\w+\.)*(test_\w+)', re.M)
_aside = {}  # name -> module, while tests run that do not use it
_registered = defaultdict(list)  # its name -> (classes by name, name, class) of registries
_running = []  # the test module


def _registries(registries):
    for registry in registries:
        yield registry.module_dict
        yield from _registries(registry.children.values())


def _put_aside(names):
    """Take modules out of `sys.modules`, and what they have registered out of registries."""
    from mmengine import registry
    _aside.update((name, sys.modules.pop(name)) for name in names)
    for classes in _registries(each for each in vars(registry).values()
                               if isinstance(each, registry.Registry)):
        for name, cls in list(classes.items()):
            module = getattr(cls, '__module__', None)
            if module in names:
                _registered[module].append((classes, name, classes.pop(name)))


def _put_back(names):
    for module in names & _aside.keys():
        sys.modules[module] = _aside.pop(module)
        for classes, name, cls in _registered.pop(module, ()):
            classes[name] = cls


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item):
    """Let a run find of all that is collected what its test module uses."""
    if [item.module] == _running:
        return
    from mmrepro.facts import own_code
    from mmrepro.util import libraries
    _running[:] = [item.module]
    text = item.path.read_text(encoding='utf-8')
    tests = {item.module.__name__, *_IMPORTED_TEST.findall(text)}
    names_them = bool(_NAMES_THEM.search(text))
    mine, others = set(), set()
    for name, module in {**sys.modules, **_aside}.items():
        last = name.rpartition('.')[2]
        if name.partition('.')[0] in _OF_FEW:
            (mine if names_them else others).add(name)
        elif last.startswith('test_') and _module(Path(libraries.file_of(module) or '/')):
            (mine if last in tests else others).add(name)
    _put_aside(others & sys.modules.keys())
    _put_back(mine)
    if 'rank_pool' in sys.modules:
        sys.modules['rank_pool'].end_shared_pool()
    own_code._seen.clear()
    own_code._looked_at.clear()
    for file in filter(None, map(libraries.file_of, list(sys.modules.values()))):
        libraries.is_own(file)  # remembered: processes of tests need not look again


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item):
    """Note what a phase of a test took: its set-up, the test or its end."""
    report = yield
    before, _clock[0] = _clock[0], _processor_time()
    report.user_properties.append(('processor time', [_module(item.path), _clock[0] - before]))
    return report


def pytest_runtest_logreport(report):
    if 'PYTEST_XDIST_WORKER' in os.environ:
        return  # the process that started this one gets the report as well
    module, seconds = dict(report.user_properties).get('processor time', ('', 0))
    _seconds[module] += seconds
    if report.failed:  # shown at once as well: a run that is killed has no summary
        print(f'\n{report.nodeid} failed ({report.when}):', report.longreprtext[-2000:], flush=True)


def pytest_sessionfinish(session):
    if not session.config.getoption('--write-durations') or 'PYTEST_XDIST_WORKER' in os.environ:
        return
    known = {**json.loads(DURATIONS.read_text()),
             **{name: round(seconds, 1) for name, seconds in _seconds.items()}}
    DURATIONS.write_text(json.dumps(
        {name: known[name] for name in sorted(known)
         if known[name] >= 0.5 and (DURATIONS.parent / name).is_file()}, indent=1) + '\n')


@pytest.fixture(autouse=True)
def nothing_stays_in_force():
    """Undo, after a test, the flags and kernels that a training has set, and a deactivation.

    A handler of a signal that stayed would be inherited by processes, which then outlive SIGTERM.
    """
    handlers = [signal.getsignal(number) for number in SIGNALS]
    yield
    assert handlers == [signal.getsignal(number) for number in SIGNALS]
    mmrepro.activate(randomness={})
    if 'mmrepro.checkpoint.training_start' in sys.modules:  # a seed that a test has set
        sys.modules['mmrepro.checkpoint.training_start']._by_script = None
    if 'mmrepro.determinism' in sys.modules:
        import torch

        from mmrepro import determinism
        from mmrepro.ops import aten
        determinism.disable()
        aten.uninstall()
        torch.use_deterministic_algorithms(False)  # of a stock runner


@pytest.fixture(scope='module')
def workers_end_soon():
    """End the persistent workers of a runner that is garbage after a tenth of a second, not five.

    Garbage collection closes the queue of a worker before PyTorch sends the worker its end, which
    then never arrives: PyTorch waits for each worker, one after the other, and terminates it.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr('torch.utils.data._utils.MP_STATUS_CHECK_INTERVAL', 0.1)
        yield


@pytest.fixture(scope='module')
def no_pause_between_passes():
    """Let MMEngine's loop over iterations go on at once; it sleeps two seconds between passes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr('mmengine.runner.loops.time', SimpleNamespace(sleep=lambda seconds: None))
        yield


@pytest.fixture(scope='module')
def witness_has_time():
    """Let a witness try all that is due, however long it takes on this machine."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr('mmrepro.selfcheck.witness.FREE_SECONDS', 1e6)
        yield


@pytest.fixture(autouse=True)
def steps_are_repeated_in_this_process(request):
    """Repeat steps as on devices, where a process cannot be copied.

    A copy of a process that has imported so much takes as long as a small training. Modules about
    what a copy does or leaves have the mark ``copies``; so has every training in a fresh process.
    """
    if 'copies' in request.keywords:
        yield
        return
    # with the fixture `monkeypatch`, that of each test would begin before all others and end last
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr('mmrepro.selfcheck.forked.is_possible', lambda model: False)
        yield


@pytest.fixture(scope='session')
def data_root(tmp_path_factory):
    from mmrepro.demo.dataset import write_dataset
    root = str(tmp_path_factory.mktemp('demo'))
    write_dataset(root)
    return root


@pytest.fixture(scope='session')
def base(tmp_path_factory):
    """Return the work directory of a small training; tests only read it."""
    from small_runs import finish, small_run
    folder = tmp_path_factory.mktemp('base')
    finish(small_run(folder))
    return folder


@pytest.fixture
def stock():
    """Start and end with MMDetection as it is installed."""
    from mmengine.registry import init_default_scope

    from mmrepro import patches
    init_default_scope('mmdet')  # a runner of another test may have left another scope
    patches.revert()
    yield
    patches.revert()


@pytest.fixture
def patched(stock):
    from mmrepro import patches
    patches.apply()


@pytest.fixture
def amp_on_cpu(monkeypatch):
    """Let AmpOptimWrapper train on a CPU, which MMEngine refuses and torch does."""
    import torch
    from mmengine.optim.optimizer import amp_optimizer_wrapper as module
    monkeypatch.setattr(module, 'is_cuda_available', lambda: True)
    monkeypatch.setattr(module, 'GradScaler', lambda **given: torch.amp.GradScaler('cpu', **given))
    monkeypatch.setattr('mmengine.runner.amp.get_device', lambda: 'cpu')


@pytest.fixture
def pool():
    """Real ranks, warm: see tests/support/rank_pool.py."""
    from rank_pool import shared_pool
    return shared_pool()


@pytest.fixture
def compiled():
    """Skip without a compiled mmcv; else a context in which its kernels answer."""
    from mmrepro import ops
    if not ops.is_compiled():
        pytest.skip('no compiled mmcv here')
    return lambda: ops.using('compiled')
