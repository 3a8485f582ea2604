"""A second process proves, while a run trains, that another process gets the same bits.

The witness is a fresh interpreter. It has nothing of the run but what another start of the command
would have, see :mod:`.recipe`, and the checkpoints that the run has written. It trains the first
iterations from the seed with another number of workers, and the iterations after checkpoints; the
run compares the digests, see :mod:`.witness_verdict`.
"""
from __future__ import annotations

import os
import pickle
import resource
import time
from collections.abc import Callable, Mapping, Set
from contextlib import ExitStack
from typing import Any

import torch

from ..config import RandomnessConfig, is_due
from ..errors import FingerprintError, WitnessDiffersError
from ..facts import own_code
from ..fingerprint.schema import FOLDER
from ..util.text import listed
from . import witness_verdict
from .recipe import NotRebuilt, Recipe, recipe_of, with_hooks
from .witness_process import Result, Saved, Start, WitnessProcess, free_memory, open_saved

MIN_ITERATIONS = 50  # iterations; shorter runs have a witness if one is asked for
REPEATED_ITERATIONS = 4  # iterations that are trained from the seed
EARLY_SAVE = 10  # iterations before the checkpoint that is written for the witness
RESUMED_ITERATIONS = 8  # iterations that are trained after a checkpoint: some code acts rarely
REPEATED = 'repeated'  # name of the start that trains the first iterations once more
FREE_SECONDS = 20.0  # seconds of processor time that the witness may take in any run
IMPORT_SECONDS = 5.0  # seconds that a process takes to import torch, MMEngine and MMDetection
SHORT_SECONDS = 60.0  # of processor time; of a shorter run, one process tries all at its end
MAX_TIME_SHARE = 0.01  # fraction of the processor time of the run, in addition to FREE_SECONDS
CUDA_CONTEXT = 1 << 30  # bytes that a process takes on a GPU beside its tensors
MAX_OPEN = 3  # checkpoints that wait for memory, and cannot be freed on the disk
MAX_WAIT = 600.0  # seconds that a run waits at its end for a witness that has begun
PROGRESS = 10.0  # seconds between two lines while it waits
POLL = 0.1  # seconds between two looks at a witness while a run waits
ENDED = 'the training has ended'  # begins a line while it waits


class Witness:
    """The witnesses of one runner: what they resume from, when they start, what they have found.

    Args:
        mode: ``randomness.self_checks.witness``.
        recipe: how to build the runner again, or why that cannot be done.

    Attributes:
        recipe: as given, with the hooks that code has registered.
        not_tried: why there is no witness; '' if there may be one.
        resumed: iterations at which a resumed run had the same bits, in order.
        early: the number of iterations after which a checkpoint is written for the witness; the
            same on all ranks, 0 for none.
        repeated: number of first iterations that another process has repeated.
        not_restored: attributes of own code that a resumed run does not have, by path; the
            iterations that were compared do not depend on them.
        notes: what was not tried or has failed, in words.
        advice: how to try a resume where none was tried; '{}' stands for the work directory.
    """

    saving = False  # a checkpoint is being written for the witness alone
    advice = ': mmrepro verify {}'

    def __init__(self, mode: bool | str | None, recipe: Recipe | str) -> None:
        self._mode, self.recipe = mode, recipe
        self.not_tried = recipe if isinstance(recipe, str) else ''
        self._launches = False
        self.resumed: list[int] = []
        self.repeated = self.early = 0
        self.not_restored: list[str] = []
        self.notes: list[str] = []
        self._process: WitnessProcess | None = None
        self._tries: dict[str, Saved] = {}  # by name of a start of the process
        self._origin: Saved | None = None  # from which this run was resumed
        self._waiting: list[Saved] = []
        self._newest: Saved | None = None  # a checkpoint that does not wait
        self._count = 0  # of checkpoints
        self._saved_at = 0  # iteration of the last one
        # seconds of processor time: of all witnesses, of one start, of the start of this run
        self._spent = self._cost = self._set_up = 0.0
        self._born = time.process_time()
        self._imports = IMPORT_SECONDS  # until a witness has said what it took
        self._skipped = 0  # checkpoints whose turn came when the time was spent
        self._first, self._total, self._clock = 0, 0, 0.0
        self._attributes: Mapping[int, Mapping[str, str]] = {}
        self._attributes_after: Mapping[int, Mapping[str, str]] = {}
        self._own: Set[str] = frozenset()
        self._of_a_process: Set[str] = frozenset()  # attributes that each process has otherwise
        self._left: tuple[str, ...] = ()  # attributes in which samples leave something
        self._seed_is_due = True
        self._stop: Callable[[], bool] = lambda: False

    # ------------------------------------------------------------------------- the training

    def begin(self, iteration: int, total: int | None, reason: str, launches: bool,
              attributes: Mapping[int, Mapping[str, str]],
              attributes_after: Mapping[int, Mapping[str, str]] = {}, own: Set[str] = frozenset(),
              resumed_from: str | None = None, stop: Callable[[], bool] = lambda: False) -> None:
        """Decide what is tried, when the training begins; all ranks decide alike.

        Args:
            iteration: that comes first, counted from 0.
            total: iterations of the whole run; None where its loop does not say.
            reason: why this run has no witness; '' if it may have one.
            launches: whether this rank starts it.
            attributes: what the run notes to explain a difference, by iteration.
            attributes_after: the same, by the number of iterations after which it was noted.
            own: the paths of those that belong to own code; what is noted later is added.
            resumed_from: path of the checkpoint that this run continues.
            stop: whether the run shall end at once; nothing is waited for then.
        """
        self._first, self._total, self._clock = iteration, total or 0, time.process_time()
        self._set_up = self._clock - self._born
        self._launches, self._own = launches, own
        self._attributes, self._attributes_after = attributes, attributes_after
        self._stop = stop
        if reason or self.not_tried:
            self.not_tried = reason or self.not_tried
            self.advice = ''
        elif self._mode is not True and total is not None and total - iteration < MIN_ITERATIONS:
            what = 'what was left of the run' if iteration else 'the run'
            self.not_tried = f'{what} is shorter than {MIN_ITERATIONS} iterations'
        if self.not_tried:
            return
        length = self._total - iteration
        ahead = EARLY_SAVE
        if length > 0:
            ahead = min(EARLY_SAVE, max(length // 3, 1))
        self.early = iteration + ahead
        if launches and resumed_from is not None:
            self._origin = self._readable(resumed_from, iteration)
            self._seed_is_due = self._origin is not None

    def add_hooks(self, hooks: list[Any]) -> None:
        """Add hooks that code has registered."""
        if isinstance(self.recipe, Recipe):
            self.recipe = with_hooks(self.recipe, hooks)

    def saved(self, path: str, iteration: int, own: bool = False) -> bool:
        """Note a checkpoint from which a run can resume.

        Args:
            own: it was written for the witness.

        Returns:
            Whether a witness is going to resume from it, as far as it is known now.
        """
        if self.not_tried or not self._launches:
            return False
        self._count += not own
        is_tried = own or is_due(self._count)
        since, self._saved_at = iteration - self._saved_at, iteration
        if not is_tried and 0 < self._total <= iteration:
            return False  # no iteration follows it
        known = {known.iteration for known in (*self._waiting, *self._tries.values())}
        if iteration in known.union(self.resumed):
            return False
        saved = self._readable(path, iteration)
        if saved is None:
            return False
        if is_tried:
            self._waiting.append(saved)
            if len(self._waiting) > MAX_OPEN and not self._is_short(iteration):
                self._waiting.pop(1).close()  # the first and the newest ones are kept
                self._skipped += 1
            return True
        if self._newest is not None:
            self._newest.close()
        self._newest = saved
        return iteration + since >= self._total  # no other follows in time; or nobody knows

    def _is_short(self, done: int) -> bool:
        """Whether one process tries everything at the end, as far as ``done`` iterations tell."""
        return 0 < self._total - self._first < MIN_ITERATIONS or (
            0 < self._seconds_per_iteration(done) * self._total < SHORT_SECONDS)

    def _readable(self, path: str, iteration: int) -> Saved | None:
        try:
            return open_saved(path, iteration)
        except OSError as error:  # a training does not end because of its witness
            self.notes.append(f'{path} was not tried: {error.strerror}')
            return None

    def advance(self, runner: Any, done: int, ends: bool = False) -> None:
        """Look at a witness that has ended, and start the next one if something is due.

        Args:
            done: number of iterations that the run has trained and noted.
            ends: the training has come to its end.

        Raises:
            WitnessDiffersError: a witness got different bits.
        """
        if self._process is not None and self._process.ended():
            self._judge(runner)
        if self._process is None and self._launches and not self.not_tried:
            self._launch(runner, done, ends)

    def _launch(self, runner: Any, done: int, ends: bool) -> None:
        if ends and self._newest is not None:
            self._waiting.append(self._newest)
            self._newest = None
        complete = [saved for saved in self._waiting if saved.iteration < done and (
            ends or saved.iteration + RESUMED_ITERATIONS <= done)]
        if not complete and not (ends and self._seed_is_due):
            return
        if self._is_short(done) and not ends:
            return
        if not self._has_memory(runner, ends):
            return
        self._waiting = [saved for saved in self._waiting if saved not in complete]
        starts = self._affordable(complete, done, ends)
        if not starts:
            return
        try:
            self._process = self._started(runner, starts, quiet=not ends)
        except (FingerprintError, OSError, pickle.PicklingError, AttributeError,
                TypeError) as error:
            self.not_tried = f'the witness could not be started: {type(error).__name__}: {error}'
            self.close()

    def _started(self, runner: Any, starts: list[Start], quiet: bool) -> WitnessProcess:
        assert isinstance(self.recipe, Recipe)
        noted = witness_verdict.noted_lines(os.path.join(runner.work_dir, FOLDER))
        metrics = witness_verdict.metrics_of(noted)
        starts = [start._replace(metrics=metrics) for start in starts]
        return WitnessProcess(
            self.recipe, starts, runner.repro.as_dict(),
            [saved.fd for saved in (*self._tries.values(), self._origin)
             if saved is not None and saved.fd is not None],
            runner.work_dir, quiet)

    def _has_memory(self, runner: Any, ends: bool) -> bool:
        """Whether a second model fits on the device; measured, and again when the training ends."""
        device = next(runner.model.parameters()).device
        if device.type not in ('cpu', 'cuda'):
            self.not_tried = f'a witness on {device.type} was never tried'
            return False
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        places = {'this machine': (free_memory(), peak)}
        if device.type == 'cuda':
            if ends:
                torch.cuda.empty_cache()
            free, _ = torch.cuda.mem_get_info(device)
            places[str(device)] = free, torch.cuda.max_memory_reserved(device) + CUDA_CONTEXT
        short = [f'{free / 2**30:.1f} GiB are free on {place}, and a second process takes '
                 f'{needed / 2**30:.1f}' for place, (free, needed) in places.items()
                 if free < needed]
        if short and ends:
            self.not_tried = short[0]
        return not short

    def _seconds_per_iteration(self, done: int) -> float:
        """Return the seconds of processor time of an iteration, when ``done`` were trained."""
        return (time.process_time() - self._clock) / max(done - self._first, 1)

    def _affordable(self, complete: list[Saved], done: int, ends: bool) -> list[Start]:
        """Return the starts that a witness can try within its share of the run's processor time.

        While the run trains, checkpoints come before the repetition from the seed. What hooks do in
        an epoch shows at the last checkpoint only, so that one comes first at the end, and the
        repetition second. Checkpoints that are left out are closed.
        """
        ordered = sorted(complete, key=lambda saved: saved.iteration)
        first = len(ordered)
        if ends:
            ordered, first = ordered[-1:] + ordered[:-1], min(first, 1)
        room = self._affordable_count(len(complete) + self._seed_is_due, done, ends)
        repeats = self._seed_is_due and room > first
        kept, left = ordered[:room - repeats], ordered[room - repeats:]
        self._skipped += len(left)
        for saved in left:
            saved.close()
        self._tries = {f'resumed{saved.iteration}_{number}': saved
                       for number, saved in enumerate(kept)}
        starts = [Start(name, saved.iteration, min(saved.iteration + RESUMED_ITERATIONS, done),
                        saved.path, other_workers=True) for name, saved in self._tries.items()]
        if repeats:
            origin = None if self._origin is None else self._origin.path
            until = min(self._first + REPEATED_ITERATIONS, done)
            starts.insert(0, Start(REPEATED, self._first, until, origin, other_workers=True))
            self._seed_is_due = not ends  # nothing is tried again at the end
        return starts

    def _affordable_count(self, wanted: int, done: int, ends: bool) -> int:
        """Return how many of ``wanted`` trainings there is time for."""
        if self._mode is True:
            return wanted
        each = self._seconds_per_iteration(done)
        start = self._cost or self._set_up + RESUMED_ITERATIONS * each  # a guess, for the first
        left = FREE_SECONDS + MAX_TIME_SHARE * each * max(self._total, done) - self._spent
        left -= self._imports
        if self._total and not ends:  # one more process is to try the last checkpoint
            left -= self._imports + start
        return max(min(wanted, int(left / max(start, 1e-3))), 0)

    # ------------------------------------------------------------------------- the verdict

    def _judge(self, runner: Any) -> None:
        """Compare the results of a witness that has ended with the run."""
        process, self._process = self._process, None
        assert process is not None
        try:
            results = process.results()
            self._cost = max(result.seconds for result in results)
            self._imports = max(result.imports for result in results) or self._imports
            self._spent += sum(result.seconds + result.imports for result in results)
            for start, result in zip(process.starts, results):
                self._judge_one(runner, start, result)
        except (FingerprintError, OSError) as error:  # files of the run, or of another process
            text = f'what was noted for a witness cannot be read: {error}'
            self.notes.append(text)
            runner.logger.warning(f'witness: {text}')
        finally:
            for saved in self._tries.values():
                saved.close()
            self._tries = {}
            process.kill()

    def _judge_one(self, runner: Any, start: Start, result: Result) -> None:
        repeats = start.name == REPEATED
        what = 'a repetition of the first iterations' if repeats else \
            f'a resume at iteration {start.begin}'
        finding = self._compared(runner, start, result)
        edited = own_code.edited(own_code.code_facts(), result.code)
        if finding is not None and edited:  # the difference is explained, and is no fault
            finding = f'{witness_verdict.edited_text(edited)} while it trains'
        if isinstance(finding, str):
            text = f'{what} was not compared: {finding}'
            self.notes.append(text.splitlines()[0])  # the last line of the log is one line
            runner.logger.warning(f'witness: {text}')
            return
        self._left = self._left or witness_verdict.left_behind(result.lines)
        if not self._left and not runner.train_dataloader.num_workers and self._attributes:
            first, last = min(self._attributes), max(self._attributes)
            self._left = tuple(witness_verdict.left_between(
                self._attributes[first], self._attributes[last]))
        if finding is None:
            if repeats:
                self.repeated, self._seed_is_due = start.until - start.begin, False
                self._of_a_process = witness_verdict.of_a_process(
                    self._attributes, result.lines, start.begin)
            elif start.begin not in self.resumed:
                self.resumed = sorted([*self.resumed, start.begin])
                self._note_not_restored(runner, start, result)
            return
        finding = finding._replace(left=self._left)
        if not repeats:  # workers can change a batch, and nothing else
            others = self._repeat_with_same_workers(runner, start, 1) if finding.of_batch else []
            text = witness_verdict.resumed_text(finding, others, start.begin, runner.work_dir)
            lacks = self.recipe.left_out if isinstance(self.recipe, Recipe) else []
            if lacks:
                text += ('\nHooks that code has registered could not be given to the witness, and '
                         f'may be the cause: {listed(lacks)}')
            self._report(runner, text, not lacks)
            return
        others = self._repeat_with_same_workers(runner, start, 2)
        text, certain = witness_verdict.repeated_text(finding, others, start.until)
        self._report(runner, text, certain)

    def _note_not_restored(self, runner: Any, start: Start, result: Result) -> None:
        """Name state of own code that is lost at a resume and may have an effect later."""
        lost = witness_verdict.not_restored(
            self._attributes, result.lines, start.begin, self._of_a_process,
            self._attributes_after.get(start.until))
        own = witness_verdict.without_parts(name for name in lost if name in self._own)
        new = sorted(name for name in own if name not in self.not_restored)
        self.not_restored += new
        if new:
            runner.logger.warning(witness_verdict.not_restored_text(
                new, start.begin, start.until - start.begin))

    def _compared(self, runner: Any, start: Start, result: Result
                  ) -> witness_verdict.Finding | str | None:
        """Return the first difference from the run, or a text on why nothing could be compared."""
        if result.error:
            return result.error
        try:
            return witness_verdict.compare(
                os.path.join(runner.work_dir, FOLDER), result.lines, start.begin, start.until,
                self._attributes)
        except FingerprintError as error:
            return str(error)

    def _report(self, runner: Any, text: str, certain: bool) -> None:
        """Raise the error, or warn where ``mode`` says so or the cause is not certain."""
        if certain and self._mode != 'warn' and runner.repro.deterministic is True:
            raise WitnessDiffersError(text)
        self.notes.append(text.splitlines()[0])
        runner.logger.warning(text)

    def _repeat_with_same_workers(self, runner: Any, start: Start, count: int) -> list[Any]:
        """Return findings of processes with as many workers as the run; of two, how they differ."""
        findings: list[Any] = []
        lines: list[str] = []
        with ExitStack() as processes:  # a folder of results goes with its process
            for _ in range(count):  # one after the other: there is memory for one
                alike = start._replace(other_workers=False)
                process = self._started(runner, [alike], quiet=False)
                processes.callback(process.kill)
                if not self._wait(runner, process, 'another process tells why bits differ'):
                    return []
                result, = process.results()
                lines.append(result.lines)
                findings.append(self._compared(runner, start, result))
            if count == 2 and not any(isinstance(finding, str) for finding in findings):
                findings.append(witness_verdict.compare(
                    lines[0], lines[1], start.begin, start.until))
        return findings

    # ------------------------------------------------------------------------- the end

    def finish(self, runner: Any, done: int) -> None:
        """Wait for the witness that runs, and for the last one.

        Raises:
            WitnessDiffersError: a witness got different bits.
        """
        try:
            for _ in range(2):
                if self._process is not None and not self._wait(runner, self._process, ENDED):
                    self.notes.append('the last witness was not waited for')
                    break
                self.advance(runner, done, ends=True)
            else:
                if self._process is not None and self._wait(runner, self._process, ENDED):
                    self._judge(runner)
        except KeyboardInterrupt:
            self.notes.append('the last witness was skipped by Ctrl-C')
        finally:
            self.close()

    def _wait(self, runner: Any, process: WitnessProcess, why: str) -> bool:
        """Wait for a process, with a line of progress; return whether it has ended."""
        process.hurry()
        began = said = time.monotonic()
        while not process.ended():
            now = time.monotonic()
            if self._stop() or now - began > MAX_WAIT:
                return False
            if now - said > PROGRESS:
                said = now
                runner.logger.info(f'{why}; waiting for the witness since {now - began:.0f} s '
                                   '(Ctrl-C skips it)')
            time.sleep(POLL)
        return True

    def close(self) -> None:
        """End what still runs; may be called at any time."""
        if self._process is not None:
            self._process.kill()
            self._process = None
        for saved in filter(None, [
                *self._waiting, *self._tries.values(), self._newest, self._origin]):
            saved.close()
        self._waiting, self._tries, self._newest, self._origin = [], {}, None, None

    def summary(self, work_dir: str) -> str:
        """Return the repetitions and resumes that were tried, for the last line of the log."""
        parts = []
        if self.repeated:
            parts.append(f'the first {self.repeated} iterations were repeated by a witness: same '
                         'bits')
        if self.resumed:
            parts.append('resumed by a witness at '
                         f'{witness_verdict.iterations(self.resumed)}: same bits')
        if self.not_restored:
            parts.append('a resume does not restore '
                         f'{listed(self.not_restored, witness_verdict.SHOWN)}')
        reasons = f'for lack of memory or to stay within {MAX_TIME_SHARE:.0%} of the time'
        if self._skipped:
            parts.append(f'checkpoints left out, {reasons}: {self._skipped}')
        if self._seed_is_due and self.resumed and not self.notes:
            parts.append(f'the first iterations were not repeated, {reasons}')
        parts += self.notes
        if self.resumed:
            return '; '.join(parts)
        reason = self.not_tried or 'no checkpoint was followed by enough iterations'
        if self._skipped and not self.not_tried:
            reason = 'those that could be resumed were left out'
        if not self.notes:
            parts.append(f'no resume was tried ({reason}){self.advice.format(work_dir)}')
        return '; '.join(parts)


def witness_of(config: RandomnessConfig, cls: type, settings: Mapping[str, Any],
               variables: Mapping[str, str]) -> Witness:
    """Return the witness of a runner that is being built."""
    mode = config.self_checks.witness
    if not config.wants_witness:
        return Witness(mode, 'it is switched off')
    try:
        return Witness(mode, recipe_of(cls, settings, variables))
    except NotRebuilt as problem:
        return Witness(mode, str(problem))
