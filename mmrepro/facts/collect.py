"""Collect the facts of a run that a resume compares, and the further fields of a manifest.

Facts are settings, versions and hardware. Beside them are the command, packages, the machine, code
and files of the run.
"""
from __future__ import annotations

import ast
import fnmatch
import functools
import glob
import hashlib
import importlib.metadata
import os
import platform
import re
import subprocess
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from ..determinism.cpu_level import cpu_instructions
from ..distributed.agreement import start_fields
from ..distributed.process_group import process_count
from ..errors import ConfigError
from ..objects.walks import dicts
from ..util.libraries import name_and_version
from ..util.text import qualified_name
from .own_code import code_facts
from .training_data import file_record
from .variables import Read, reads

# keys of a config that MMEngine writes by itself, or that say where and not what
NOT_SETTINGS = ('randomness', 'resume', 'load_from', 'work_dir', 'launcher', 'experiment_name')

# features that libraries have kernels for, as Linux calls them: x86-64, then ARM
CPU_FEATURES = (
    'sse4_1', 'sse4_2', 'avx', 'f16c', 'fma', 'avx2', 'avx512f', 'avx512dq', 'avx512bw', 'avx512vl',
    'avx512_vnni', 'avx512_vbmi2', 'avx512_bf16', 'avx512_fp16', 'amx_tile', 'amx_int8', 'amx_bf16',
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


def _torch_build() -> str:
    """Return a digest of how torch was built, without the instruction set that this CPU has."""
    lines = [line for line in torch.__config__.show().splitlines()
             if 'CPU capability usage' not in line]
    return hashlib.sha256('\n'.join(lines).encode()).hexdigest()[:16]


@functools.cache
def _hardware() -> dict[str, Any]:
    facts = {
        'hardware.cpu': cpu_name(),
        'hardware.cpu_instructions': cpu_instructions(),
        'hardware.cpu_features': cpu_features(),
        # compilers and libraries; the same version can come in several builds
        'version.torch_build': _torch_build(),
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


# Variables that reach kernels, libraries, launchers; all others, secrets among them, stay out.
RECORDED_VARIABLES = (
    'PYTHONHASHSEED', 'PYTHONOPTIMIZE', '*_NUM_THREADS', 'KMP_*', 'GOMP_*', 'MKL_*', 'ONEDNN_*',
    'DNNL_*', 'ATEN_*', 'CUDA_*', 'CUBLAS*', 'CUDNN_*', 'NVIDIA_TF32_OVERRIDE',
    'NVIDIA_VISIBLE_DEVICES', 'NVTE_*', 'NCCL_*', 'TORCH_*', 'TORCHINDUCTOR_*', 'TORCHDYNAMO_*',
    'PYTORCH_*', 'TRITON_*', 'FLASH_ATTENTION_*', 'WORLD_SIZE', 'LOCAL_WORLD_SIZE', 'SLURM_NTASKS',
    'OPENCV_*', 'NPY_*', 'OPENBLAS_*', 'TZ', 'LC_*', 'LANG', 'MMREPRO_*')
# Recorded variables that belong to the machine and the launcher: a repeated run has its own.
NOT_REPEATED = ('WORLD_SIZE', 'LOCAL_WORLD_SIZE', 'RANK', 'LOCAL_RANK', 'MASTER_ADDR',
                'MASTER_PORT', 'SLURM_NTASKS', 'CUDA_VISIBLE_DEVICES', 'NVIDIA_VISIBLE_DEVICES',
                'MMREPRO_RESTARTED')
# Names that look as if their values were secret are never recorded.
SECRET = re.compile(r'KEY|TOKEN|SECRET|PASS|CREDENTIAL|AUTH|COOKIE', re.IGNORECASE)
HIDDEN = '(not recorded)'
_NAMES = (r'password|passwd|secret|api[_-]?key|access[_-]?key(?:[_-]id)?|credential'
          r'|(?:auth|access|hf)[_-]?token')
# Secrets of known forms, wherever they stand: group 1 stays, the rest is hidden.
# The tokens are one expression, because each would look at every word of a text again.
_TOKENS = (
    r'gh[pousr]_[A-Za-z0-9]{20,}', r'github_pat_\w{20,}', r'glpat-[\w-]{16,}',
    r'hf_[A-Za-z0-9]{20,}', r'(?:AKIA|ASIA)[0-9A-Z]{16}\b', r'xox[a-z]-[\w-]{10,}',
    r'sk-[\w-]{20,}', r'AIza[\w-]{35,}', r'npm_[A-Za-z0-9]{30,}', r'pypi-[\w-]{40,}',
    r'eyJ[\w-]{8,}\.eyJ[\w-]{8,}\.[\w-]*')
_FORMS = (
    re.compile(rf'()\b(?:{"|".join(_TOKENS)})'),
    re.compile(r'()-----BEGIN [A-Z ]*PRIVATE KEY-----[^\'"]*'),
    # user and password of a URL, but not its port
    re.compile(r'(://)[^\s/\'"@]*(?::(?!\d+/)[^\s\'"@]*)?@(?:[^\s/\'"@]*@)*'),
    re.compile(r'(?i)([?&][\w-]*(?:sig|signature|token|key|password|secret|credential)=)[^\s&\'"(]+'))
# A secret that is assigned: in a command or a connection string, and as a literal of Python.
# To look for the first letters of _NAMES beforehand takes a third of the time.
_ASSIGNED = re.compile(rf'(?i)((?=[pscah])(?:{_NAMES}|pwd)s?=)[^\s&;,\'"()]+')
_LITERAL = re.compile(
    rf'(?i)((?=[pscah])(?:{_NAMES})s?[\'"]?\s*[=:]\s*([\'"]))[^\'"\n]{{6,}}(?=\2)')

MAX_DIFF = 1 << 20  # bytes of uncommitted changes that are kept; the digest is of all


def environment(env: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the variables that may matter; never one whose name looks like a secret's."""
    return {name: without_secrets(env[name]) for name in sorted(env) if _is_recorded(name)}


def _is_recorded(name: str) -> bool:
    return not SECRET.search(name) and any(
        fnmatch.fnmatchcase(name, pattern) for pattern in RECORDED_VARIABLES)


def other_variables(found: Iterable[Read]) -> dict[str, dict[str, str | None]]:
    """Return the variables that :func:`environment` leaves out: value, and who read it last.

    Code may set a variable that it has read before: the last reader counts.
    Of a name that looks like a secret's, 16 bits of a digest stand for the value.
    """
    return {read.name: dict(value=_hidden(read.name, read.value), read=f'{read.file}:{read.line}')
            for read in found if read.name not in NOT_REPEATED and not _is_recorded(read.name)}


def variable_facts(then: Iterable[str] = ()) -> dict[str, str | None]:
    """Return the facts on variables that user code has read by now.

    Those that are named in ``then``, the facts of a run, have the value that they have here.
    """
    now = {f'variables.{name}': read['value'] for name, read in other_variables(reads()).items()}
    names = (fact.partition('.')[2] for fact in then
             if fact.startswith('variables.') and fact not in now)
    return {**now, **{f'variables.{name}': _hidden(name, os.environ.get(name)) for name in names}}


def without_secrets(text: str, code: bool = False) -> str:
    """Replace secrets of known forms in a text; ``code``: it is Python, and has to stay so.

    Of a secret, 16 bits of a digest stay: enough to see that two runs differ, too little to find
    the value.
    """
    for form in (*_FORMS, _LITERAL if code else _ASSIGNED):
        text = form.sub(lambda found: found[1] + _digest(found[0][len(found[1]):]) + (
            '@' if found[0].endswith('@') else ''), text)
    return text


def _digest(secret: str) -> str:
    return f'{HIDDEN[:-1]}, SHA-256 {hashlib.sha256(secret.encode()).hexdigest()[:4]}...)'


def is_hidden(value: str | None) -> bool:
    """Whether a recorded value lacks a secret, so that no run can be started with it."""
    return value is not None and HIDDEN[:-1] in value


def _hidden(name: str, value: str | None) -> str | None:
    if value is None:
        return None
    return _digest(value) if SECRET.search(name) else without_secrets(value)


def repeated_environment(manifest: Mapping[str, Any]) -> dict[str, str | None]:
    """Return the variables to start a repetition with; None removes a variable of this process."""
    recorded: dict[str, Any] = {
        **dict.fromkeys(environment()), **(manifest.get('environment') or {}),
        **{name: read['value'] for name, read in (manifest.get('variables') or {}).items()}}
    return {name: value for name, value in recorded.items()
            if name not in NOT_REPEATED and not is_hidden(value)}


def command(argv: Sequence[str]) -> list[str]:
    """Return the command line without the values of arguments that look like secrets."""
    words, hide = [], False
    for word in argv:
        name, equals, _ = word.partition('=')
        if hide and not word.startswith('-'):
            word = HIDDEN
        elif SECRET.search(name) and equals:
            word = f'{name}={HIDDEN}'
        hide = bool(SECRET.search(word)) and word.startswith('--') and not equals
        words.append(without_secrets(word))
    return words


def packages() -> dict[str, str]:
    """Return the versions of all installed packages."""
    named = map(name_and_version, importlib.metadata.distributions())
    return dict(sorted({name.lower().replace('_', '-'): version
                        for name, version in named if name}.items()))


def machine() -> dict[str, Any]:
    """Describe the machine beyond its facts: counts, all GPUs, the build of torch."""
    gpus = range(torch.cuda.device_count() if torch.cuda.is_available() else 0)
    return dict(
        platform=platform.platform(), cores=os.cpu_count(), torch_config=torch.__config__.show(),
        torch_git=torch.version.git_version, torch_parallel=torch.__config__.parallel_info(),
        gpus=list(map(torch.cuda.get_device_name, gpus)))


def code(*paths: str | None) -> dict[str, Any]:
    """Describe the git repositories that hold these paths: commit, changes, new files."""
    repositories: dict[str, Any] = {}
    for path in paths:
        folder = path if path and os.path.isdir(path) else os.path.dirname(path or '')
        root = _git(folder or '.', 'rev-parse', '--show-toplevel').strip()
        if not root or root in repositories:
            continue
        diff = _git(root, 'diff', 'HEAD', '--no-ext-diff', '--no-color')
        new = _git(root, 'ls-files', '--others', '--exclude-standard')
        repositories[root] = dict(
            commit=_git(root, 'rev-parse', 'HEAD').strip() or None,
            diff=without_secrets(diff[:MAX_DIFF], code=True),
            diff_sha256=hashlib.sha256(diff.encode()).hexdigest(),
            untracked=new.splitlines()[:1000])
    return repositories


def _git(folder: str, *arguments: str) -> str:
    """Return the output of git; '' without git or a repository."""
    try:
        done = subprocess.run(['git', '-C', folder, *arguments], capture_output=True, timeout=60,
                              env={**os.environ, 'GIT_OPTIONAL_LOCKS': '0'})
    except (OSError, subprocess.TimeoutExpired):
        return ''
    return done.stdout.decode(errors='replace') if done.returncode == 0 else ''


def weights(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the checkpoints that a config starts from: `load_from` and every `init_cfg`."""
    files = {name: _local(name) for name in _checkpoints(config)}
    return {name: file_record(path) if path else dict(error='no local file')
            for name, path in files.items()}


def _checkpoints(config: Any) -> Iterator[str]:
    for node in dicts(config):
        start = node.get('init_cfg')
        inits = start if isinstance(start, (list, tuple)) else [start]
        for name in (node.get('load_from'), *(init.get('checkpoint') for init in inits
                                              if isinstance(init, Mapping))):
            if isinstance(name, str):
                yield name


def _local(name: str) -> str | None:
    """Return the local file: ``name``, or the download of torch; None if there is none."""
    if '://' not in name:
        return name
    folder = os.path.join(torch.hub.get_dir(), 'checkpoints')
    stem = name.rsplit('/', 1)[-1]
    stems = [stem] if '.' in stem else [f'{stem}-*.pth', f'{stem}.pth']
    files = sorted(file for pattern in stems for file in glob.glob(os.path.join(folder, pattern)))
    return files[0] if len(files) == 1 else None
