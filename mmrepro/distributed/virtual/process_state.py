"""State of a process that every virtual rank has to itself: exchanged when one hands over."""
from __future__ import annotations

import copy
import io
import os
import random
import sys
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch

# modules and the names of their state
MODULE_STATE: tuple[tuple[str, str], ...] = (
    # the process groups
    ('torch.distributed.distributed_c10d', '_world'),
    ('mmengine.dist.utils', '_LOCAL_PROCESS_GROUP'),
    # the flags that the runner of a rank has set
    ('mmrepro.determinism.policy', '_active'),
    # on while a model is built, where ranks may meet
    ('torch.utils.deterministic', 'fill_uninitialized_memory'),
    ('sys', 'stdout'),
)
# packages whose classes and caches keep nothing that depends on the rank
KNOWN = {'builtins', 'torch', 'numpy', 'mmengine', 'mmcv', 'mmdet', 'mmrepro'}
# what a launcher tells a process, and user code reads
LAUNCHED: tuple[str, ...] = ('RANK', 'WORLD_SIZE', 'LOCAL_RANK', 'LOCAL_WORLD_SIZE')

# classes of the user whose attributes each rank has to itself -> those that it begins with
_classes: dict[type, dict[str, Any]] = {}


def keep_attributes(objects: Iterable[Any]) -> None:
    """The attributes of the classes of ``objects`` belong to a rank, as with a process for each."""
    for kind in {kind for one in objects for kind in type(one).__mro__}:
        if kind.__module__.partition('.')[0] not in KNOWN:
            _classes.setdefault(kind, dict(vars(kind)))


def managers() -> list[type]:
    """MMEngine's classes that keep their instances by name: loggers, message hubs, scopes."""
    from mmengine.utils import ManagerMixin
    found: list[type] = []
    waiting: list[type] = [ManagerMixin]
    while waiting:
        found.append(waiting.pop())
        waiting += found[-1].__subclasses__()
    return found


class Silence(io.TextIOBase):
    """Standard output of all ranks but the first."""

    def write(self, text: str) -> int:
        return len(text)

    def writable(self) -> bool:
        return True


def _accelerator() -> torch.Generator | None:
    """The generator of the device in use, where there is one."""
    if torch.cuda.is_initialized():
        return torch.cuda.default_generators[torch.cuda.current_device()]
    return None


class ProcessState:
    """The state of one rank while another one runs."""

    def __init__(self) -> None:
        self._python = random.getstate()
        self._numpy = np.random.get_state()
        self._torch = torch.get_rng_state()
        self._dtype = torch.get_default_dtype()
        generator = _accelerator()
        self._device = None if generator is None else generator.get_state()
        self._modules: dict[tuple[str, str], Any] = {
            row: getattr(sys.modules[row[0]], row[1]) for row in MODULE_STATE
            if row[0] in sys.modules}
        self._instances = {cls: cls._instance_dict for cls in managers()}
        self._environment = {name: os.environ.get(name) for name in LAUNCHED}
        self._classes = {kind: dict(vars(kind)) for kind in _classes}

    def restore(self) -> None:
        """Bring it back into force."""
        random.setstate(self._python)
        np.random.set_state(self._numpy)
        torch.set_rng_state(self._torch)
        torch.set_default_dtype(self._dtype)
        generator = _accelerator()
        if generator is not None and self._device is not None:
            generator.set_state(self._device)
        for module, name in MODULE_STATE:
            if module in sys.modules:
                # one that another rank was the first to import begins with None, as all of them do
                setattr(sys.modules[module], name, self._modules.get((module, name)))
        for cls in managers():
            # a class that another rank was the first to import: no instance of ours yet
            cls._instance_dict = self._instances.setdefault(cls, type(cls._instance_dict)())
        for name, value in self._environment.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        for kind, start in _classes.items():
            own, now = self._classes.get(kind, start), dict(vars(kind))
            for name in now.keys() - own.keys():
                delattr(kind, name)
            for name, value in own.items():
                if now.get(name, own) is not value:
                    setattr(kind, name, value)

    def end(self) -> None:
        """Restore it when all ranks have ended."""
        self.restore()
        _classes.clear()

    def of_rank(self, number: int, world: Any) -> ProcessState:
        """A copy of this for a rank that begins, with its process groups.

        Its environment says that all ranks run on one machine: a process may have any of them.
        """
        own = copy.copy(self)
        own._modules = {row: copy.copy(value) if isinstance(value, dict) else value
                        for row, value in self._modules.items()}
        own._modules['torch.distributed.distributed_c10d', '_world'] = world
        if number:
            own._modules['sys', 'stdout'] = Silence()
        size = world.default_pg.size()
        own._environment = {name: str(size if name.endswith('SIZE') else number)
                            for name in LAUNCHED}
        own._instances = {cls: copy.copy(value) for cls, value in self._instances.items()}
        return own
