"""Collect the facts of a run (settings, versions, hardware), which a resume compares."""
from __future__ import annotations

import ast
import functools
import hashlib
import os
import platform
import re
from collections.abc import Mapping
from typing import Any

import torch

from ..determinism.cpu_level import cpu_instructions
from ..distributed.agreement import start_fields
from ..distributed.process_group import process_count
from ..errors import ConfigError
from ..util.text import qualified_name
from .own_code import code_facts

# keys of a config that MMEngine writes by itself, or that say where and not what
NOT_SETTINGS = ('randomness', 'resume', 'load_from', 'work_dir', 'launcher', 'experiment_name')

# features that libraries have kernels for, as Linux calls them: x86-64, then ARM
CPU_FEATURES = (
    'sse4_1', 'sse4_2', 'avx', 'f16c', 'fma', 'avx2', 'avx512f', 'avx512dq', 'avx512bw', 'avx512vl',
    'avx512_vnni', 'avx512_bf16', 'avx512_fp16', 'amx_tile', 'amx_int8', 'amx_bf16',
    'asimd', 'asimdhp', 'asimddp', 'sve', 'sve2', 'bf16', 'i8mm')

ADDRESS = re.compile(' at 0x[0-9a-f]+')


def flatten(settings: Any, name: str = '') -> dict[str, Any]:
    """Return nested dicts and lists as ``{'a.b[0].c': value}``; JSON can hold the values.

    >>> flatten({'a': {'b': [dict(c=1), 2]}, 'd': (3, 4)})
    {'a.b[0].c': 1, 'a.b[1]': 2, 'd': '[3, 4]'}
    """
    if isinstance(settings, Mapping) and settings:
        parts = ((f'{name}.{key}' if name else str(key), value)
                 for key, value in settings.items())
    elif isinstance(settings, (list, tuple)) and any(
            isinstance(item, (Mapping, list, tuple)) for item in settings):
        parts = ((f'{name}[{index}]', value) for index, value in enumerate(settings))
    else:
        return {name: _plain(settings)}
    return {path: value for key, part in parts for path, value in flatten(part, key).items()}


def _plain(value: Any) -> Any:
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, (list, tuple)):
        # a config file turns tuples into lists and back
        return repr([_plain(item) for item in value])
    if callable(value) and hasattr(value, '__qualname__'):  # its repr holds an address
        return qualified_name(value)
    return ADDRESS.sub('', repr(value))  # a data loader, say, that was built by hand


def collect_facts(config: Any, randomness: Mapping[str, Any], world_size: int) -> dict[str, Any]:
    """Return all that may decide about bits, as ``{name: string, number, boolean or None}``.

    ``config`` and ``randomness`` are those in effect, the seed included.
    """
    facts = start_fields('', randomness)
    del facts['config']
    facts['world_size'], facts['processes'] = world_size, process_count()
    if 'LOCAL_WORLD_SIZE' in os.environ:  # of launchers that start a process per rank
        facts['ranks_per_machine'] = os.environ['LOCAL_WORLD_SIZE']
    if world_size > 1 and randomness.get('worker_seed', 'mmengine') != 'mmengine':
        facts['evaluation.buffers'] = 'common to all ranks'
    facts.update(_hardware())
    facts.update(code_facts())
    facts.update(settings_of(config.to_dict()))
    return facts


def read_settings(text: str | bytes) -> dict[str, Any]:
    """Return the settings in the text of a config that MMEngine wrote (``Config.pretty_text``).

    Unlike ``Config.fromstring``, this runs nothing: the text may come from anywhere. Whatever is
    neither a literal nor a ``dict(...)`` of literals stays text.

    >>> read_settings("a = dict(b=[1, -2.5], c=None)\\nd = open('x')")
    {'a': {'b': [1, -2.5], 'c': None}, 'd': "open('x')"}

    Raises:
        ConfigError: ``text`` is not Python, or nested too deeply.
    """
    try:
        return {statement.targets[0].id: _literal(statement.value)
                for statement in ast.parse(text).body if isinstance(statement, ast.Assign)
                and isinstance(statement.targets[0], ast.Name)}
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError) as error:
        raise ConfigError(f'not the text of a config: {str(error) or "nested too deeply"}'
                          ) from error


def _literal(node: Any) -> Any:
    if isinstance(node, (ast.List, ast.Tuple)):
        return [_literal(item) for item in node.elts]
    if isinstance(node, ast.Dict) and all(node.keys):
        return {_literal(key): _literal(value) for key, value in zip(node.keys, node.values)}
    if isinstance(node, ast.Call) and ast.unparse(node.func) == 'dict' and not node.args:
        return {word.arg: _literal(word.value) for word in node.keywords}
    try:
        return ast.literal_eval(node)
    except ValueError:
        return ast.unparse(node)


def settings_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a config, given as plain dict, as ``{'config.model.type': ...}``."""
    kept = {key: value for key, value in config.items() if key not in NOT_SETTINGS}
    if not kept.get('custom_hooks', True):  # None and [] are the same as nothing
        del kept['custom_hooks']
    flat = flatten(kept) if kept else {}
    return {f'config.{name}': value for name, value in flat.items()}


@functools.cache
def _hardware() -> dict[str, Any]:
    facts = {
        'hardware.cpu': cpu_name(),
        'hardware.cpu_instructions': cpu_instructions(),
        'hardware.cpu_features': cpu_features(),
        # compilers and libraries; the same version can come in several builds
        'version.torch_build': hashlib.sha256(torch.__config__.show().encode()).hexdigest()[:16],
        'library.libc': ' '.join(platform.libc_ver()).strip() or None,
        'hardware.gpu': None,
    }
    if torch.cuda.is_available():
        facts['hardware.gpu'] = torch.cuda.get_device_name()
        facts['version.cudnn'] = torch.backends.cudnn.version()
        facts['version.driver'] = getattr(torch._C, '_cuda_getDriverVersion')()  # noqa: B009
        if torch.distributed.is_available() and torch.distributed.is_nccl_available():
            facts['version.nccl'] = '.'.join(map(str, torch.cuda.nccl.version()))
    return facts


def cpu_name() -> str:
    """Return the model name of the processor, or its architecture where there is none."""
    return _cpuinfo('model name') or f'{platform.machine()} {platform.processor()}'.strip()


def cpu_features() -> str | None:
    """Return which :data:`CPU_FEATURES` this processor has; None where the system does not say."""
    flags = (_cpuinfo('flags') or _cpuinfo('Features')).split()
    return ' '.join(name for name in CPU_FEATURES if name in flags) if flags else None


def _cpuinfo(key: str) -> str:
    """Return the first value of a key in /proc/cpuinfo, or ''."""
    try:
        with open('/proc/cpuinfo') as file:
            lines = (line.partition(':') for line in file)
            return next((value.strip() for name, _, value in lines if name.strip() == key), '')
    except OSError:  # other systems have no such file
        return ''
