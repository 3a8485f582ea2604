"""Names what mmrepro changes in its process: ``process_state.py FILE FOLDER``, of trainings.

The JSON file has, for each moment, the attributes of modules and classes, signal handlers,
variables, descriptors and so on that are others than before.
"""
import atexit
import contextlib
import gc
import importlib
import json
import os
import signal
import sys
import threading
import types
from pathlib import Path

TOPS = ('mmcv', 'mmdet', 'mmengine', 'numpy', 'torch')
AUDITED = []


def _is_watched(name):
    top = name.partition('.')[0]
    return top in TOPS or top in sys.stdlib_module_names


def _content(value):
    """Return what a container holds, by identity; the value itself otherwise."""
    if isinstance(value, dict):
        return [*value, *value.values()]
    if isinstance(value, set):
        return sorted(value, key=id)
    return list(value) if isinstance(value, list) else value


def attributes():
    """Return the attributes of modules, and of the classes that are defined in them."""
    found = {}
    for name, module in list(sys.modules.items()):
        if not isinstance(module, types.ModuleType) or not _is_watched(name):
            continue
        for key, value in list(vars(module).items()):
            if isinstance(value, types.ModuleType):
                continue
            found[f'{name}.{key}'] = value, _content(value)
            if isinstance(value, type) and value.__module__ == name:
                found.update((f'{name}.{key}.{attribute}', (held, _content(held)))
                             for attribute, held in list(vars(value).items()))
    return found


def _same(first, second):
    if first[0] is not second[0] and (isinstance(first[0], type) or first[0] != second[0]):
        return False
    if isinstance(first[1], list):
        return [id(item) for item in first[1]] == [id(item) for item in second[1]]
    return True


def _equal(first, second):
    try:
        return _same(first, second)
    except Exception:  # arrays have no truth value
        return first[0] is second[0]


def process():
    """Return what is not an attribute, by name."""
    files = {}
    for descriptor in os.listdir('/proc/self/fd'):
        try:
            path = os.readlink(f'/proc/self/fd/{descriptor}')
        except OSError:  # of this listing
            continue
        if not path.endswith('.log'):  # of MMEngine
            files[f'descriptor {path}'] = True
    return {
        **files,
        **{f'variable {name}': value for name, value in os.environ.items()},
        **{f'signal {number.name}': signal.getsignal(number) for number in signal.Signals},
        **{f'thread {thread.name}': True for thread in threading.enumerate()},
        'class of os.environ': type(os.environ), 'atexit': atexit._ncallbacks(),
        'gc': (gc.isenabled(), gc.get_threshold(), len(gc.callbacks)),
        'profile': sys.getprofile(), 'trace': sys.gettrace(), 'umask': _umask(),
        'directory': os.getcwd(), 'recursion limit': sys.getrecursionlimit(),
        **{f'kernel {name}': True for name in importlib.import_module('torch.library')._impls},
        **flags(),
    }


def _umask():
    value = os.umask(0)
    os.umask(value)
    return value


def flags():
    """Return what functions of torch set that leave no trace in a module."""
    import torch
    return {
        'torch.use_deterministic_algorithms': (
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled()),
        'torch.set_num_threads': torch.get_num_threads(),
        'torch.set_default_dtype': torch.get_default_dtype(),
        'torch.backends.cudnn.benchmark': torch.backends.cudnn.benchmark,
        'torch.backends.cudnn.deterministic': torch.backends.cudnn.deterministic,
        'torch.set_float32_matmul_precision': torch.get_float32_matmul_precision(),
        'torch.utils.deterministic.fill_uninitialized_memory':
            torch.utils.deterministic.fill_uninitialized_memory,
        'torch.set_flush_denormal': float(torch.tensor([1e-310], dtype=torch.float64) * 1) == 0}


def changed(before, after):
    """Return the names of what differs."""
    return sorted(key for key in {*before, *after}
                  if key not in after or key not in before or not _equal(before[key], after[key]))


def differences(before, after):
    modules = {name.rpartition('.')[0] for name in before[0]}
    attributes = [name for name in changed(before[0], after[0])
                  if any(name.startswith(f'{module}.') for module in modules)
                  and _known(name, modules)]
    return attributes + [key for key in sorted({*before[1], *after[1]})
                         if before[1].get(key) != after[1].get(key)]


def _known(name, modules):
    """Whether the module, or the class, of an attribute was there before."""
    return name.rpartition('.')[0] in modules


LIBRARIES = (
    'mmcv.ops', 'mmdet.apis', 'mmdet.datasets', 'mmdet.engine', 'mmdet.models', 'mmdet.utils',
    'mmdet.visualization', 'mmengine.runner._flexible_runner', 'numpy.random', 'torch.distributed')


def train(work_dir, hook=None, **changes):
    """Train; return the runner, which holds what it has opened."""
    from mmengine.runner import Runner
    from small_runs import config
    cfg = config(work_dir, **changes)
    runner = Runner.from_cfg(cfg)
    if hook is not None:
        runner.register_hook(hook)
    with contextlib.suppress(Ended):
        runner.train()
    return runner


class Ended(Exception):
    """The error of a training that is to end with one."""


def now():
    gc.collect()
    return attributes(), process()


def main(file, folder):
    folder = Path(folder)
    import _mmrepro_operators  # noqa: F401  operators, where mmcv has none
    for name in LIBRARIES:
        importlib.import_module(name)
    from small_runs import hook_with
    sys.addaudithook(lambda event, args: event == 'sys.addaudithook' and AUDITED.append(event))
    # twice: what the second of two trainings of MMEngine changes, any training does
    train(folder / 'stock', randomness=dict(seed=3))
    states = [now()]
    train(folder / 'again', randomness=dict(seed=3))
    states.append(now())
    importlib.import_module('mmrepro')
    states.append(now())
    fingerprints = [dict(type='FingerprintHook', level='module')]
    runners = [train(folder / 'run', custom_hooks=fingerprints)]
    states.append(now())

    def end(runner, **details):
        if runner.iter == 3:
            raise Ended
    runners.append(train(folder / 'ended', hook_with(before_train_iter=end),
                         custom_hooks=fingerprints))
    states.append(now())
    sys.modules['mmrepro'].deactivate()
    states.append(now())
    names = ('training', 'import', 'run', 'error', 'deactivation')
    found = {name: differences(*pair) for name, pair in zip(names, zip(states, states[1:]))}
    found.update(left=differences(states[1], states[-1]), hooks=len(AUDITED))
    Path(file).write_text(json.dumps(found))


if __name__ == '__main__':
    main(*sys.argv[1:])
