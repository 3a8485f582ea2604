"""Flags, variables, root seed and replacements that a run needs in its process."""
from __future__ import annotations

import threading
from typing import Any

from .. import determinism, ops, patches, seeds
from ..config import RandomnessConfig, is_due
from ..data import generators

# flags that may change during a run: no bit depends on them, unless a program reads memory before
# it writes it, which is what the flag shows
_FREE_FLAGS = ('torch.utils.deterministic.fill_uninitialized_memory', )


class ProcessSettings:
    """Settings of one runner, whose seed need not be known yet.

    They belong to the process, and the last runner that was built has set them: :meth:`hold` puts
    those of this runner in force again.

    Attributes:
        report: what :func:`mmrepro.determinism.enable` returned.
    """

    def __init__(self, config: RandomnessConfig) -> None:
        self._config = config
        self._cudnn_benchmark: bool | None = None
        self.report: determinism.PolicyReport | None = None
        self._thread = 0  # for which the settings are in force: some flags of torch are a thread's
        self._steps = 0
        self._reported: set[str] = set()

    def set_flags(self, cudnn_benchmark: bool | None) -> None:
        """Set flags and variables, before the first use of CUDA, as ``env_cfg`` says."""
        self._cudnn_benchmark = cudnn_benchmark
        self._enable()

    def _enable(self) -> None:
        # before `enable`: otherwise the thread of an earlier training would still count as the one
        # that trains
        if self._config.virtual_ranks.ranks is not None:
            generators.claim_for_this_thread(turns=True)
        self._thread = threading.get_ident()
        self.report = determinism.enable(cudnn_benchmark=self._cudnn_benchmark,
                                         **self._config.flags)

    def apply(self, config: RandomnessConfig) -> None:
        """Put all settings in force; ``config`` has the seed in effect."""
        self._config = config
        self._enable()
        seeds.set_root(config.root)
        # MMDetection, mmcv and others keep the contract from their import on
        patches.apply(stock_streams=config.uses_stock_streams)
        ops.use_from_import(config.operators or ('auto' if config.deterministic else None))

    def hold(self) -> None:
        """Put the settings in force again in another thread, or if another runner was built since.
        """
        generators.claim_for_this_thread(turns=self._config.virtual_ranks.ranks is not None)
        if determinism.in_force() is not self.report or self._thread != threading.get_ident():
            self.apply(self._config)

    def check_flags(self, logger: Any) -> None:
        """Check before steps 1, 2, 4, 8, ... that nothing has changed a flag.

        Raises:
            DeterminismError: a flag has changed, with ``deterministic=True``; otherwise it is a
                warning, once.
        """
        self._steps += 1
        if not is_due(self._steps):
            return
        text = '\n'.join(
            f'{flag.name} is {flag.after!r}; this run has set {flag.before!r} and needs it '
            f'({flag.why}). A hook, a module or a dataset has changed it; it must put it back'
            for flag in determinism.drifted() if flag.name not in _FREE_FLAGS)
        if text and self._config.deterministic is True:
            raise determinism.DeterminismError(text)
        if text and text not in self._reported:
            self._reported.add(text)
            logger.warning(text)
