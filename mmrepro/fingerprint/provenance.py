"""Command, packages, machine, code and files of a run: what a manifest has beside the facts."""
from __future__ import annotations

import fnmatch
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

from ..facts.training_data import file_record
from ..nested import dicts
from ..variables import Read, reads

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

MAX_DIFF = 1 << 20  # bytes of uncommitted changes that are kept; the digest is of all


def environment(env: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the variables that may matter; never one whose name looks like a secret's."""
    return {name: env[name] for name in sorted(env) if _is_recorded(name)}


def _is_recorded(name: str) -> bool:
    return not SECRET.search(name) and any(
        fnmatch.fnmatchcase(name, pattern) for pattern in RECORDED_VARIABLES)


def variables(found: Iterable[Read]) -> dict[str, dict[str, str | None]]:
    """Return the variables that :func:`environment` leaves out: value, and who read it last.

    Code may set a variable that it has read before: the last reader counts.
    Of a name that looks like a secret's, 16 bits of a digest stand for the value: enough to see
    that two runs differ, too little to find the value.
    """
    return {read.name: dict(value=_hidden(read.name, read.value), read=f'{read.file}:{read.line}')
            for read in found if read.name not in NOT_REPEATED and not _is_recorded(read.name)}


def variable_facts(then: Iterable[str] = ()) -> dict[str, str | None]:
    """Return the facts on variables that user code has read by now.

    Those that are named in ``then``, the facts of a run, have the value that they have here.
    """
    now = {f'variables.{name}': read['value'] for name, read in variables(reads()).items()}
    names = (fact.partition('.')[2] for fact in then
             if fact.startswith('variables.') and fact not in now)
    return {**now, **{f'variables.{name}': _hidden(name, os.environ.get(name)) for name in names}}


def _hidden(name: str, value: str | None) -> str | None:
    if value is None or not SECRET.search(name):
        return value
    return f'{HIDDEN[:-1]}, SHA-256 {hashlib.sha256(value.encode()).hexdigest()[:4]}...)'


def repeated_environment(manifest: Mapping[str, Any]) -> dict[str, str | None]:
    """Return the variables to start a repetition with; None removes a variable of this process."""
    recorded: dict[str, Any] = {
        **dict.fromkeys(environment()), **(manifest.get('environment') or {}),
        **{name: read['value'] for name, read in (manifest.get('variables') or {}).items()
           if not SECRET.search(name)}}
    return {name: value for name, value in recorded.items() if name not in NOT_REPEATED}


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
        words.append(word)
    return words


def packages() -> dict[str, str]:
    """Return the versions of all installed packages."""
    named = ((installed.metadata['Name'], installed.version)
             for installed in importlib.metadata.distributions())
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
            diff=diff[:MAX_DIFF], diff_sha256=hashlib.sha256(diff.encode()).hexdigest(),
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
