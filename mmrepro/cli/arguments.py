"""What the command lines of all verbs share: errors of one line, settings, a reader that leaves."""
from __future__ import annotations

import argparse
import functools
import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any, Callable, NoReturn

from mmengine.config import Config, DictAction

from ..errors import ConfigError
from ..exit_codes import READER_LEFT, USAGE
from ..runs.config_files import ADD, read_config
from . import program_name


class Parser(argparse.ArgumentParser):
    """Says in one line what is wrong, and exits with code 2; the usage is in ``--help``."""
    _parsing = False

    def __init__(self, verb: str, description: str = '', epilog: str | None = None) -> None:
        super().__init__(prog=program_name(verb), description=description, epilog=epilog,
                         formatter_class=argparse.RawDescriptionHelpFormatter)

    def add_number(self, name: str, default: int, metavar: str, text: str) -> None:
        """An option that is an integer; its help ends with the default."""
        self.add_argument(name, type=int, default=default, metavar=metavar,
                          help=f'{text} (default: {default})')

    def add_config_options(self, text: str = 'change settings of the config',
                           action: Any = None, default: Any = None) -> None:
        self.add_argument('--cfg-options', nargs='+', action=action or Options, default=default,
                          metavar='KEY=VALUE', help=f'{text}; {ADD}KEY=VALUE adds a key that '
                          'resembles another one')

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        self._parsing = True
        try:
            return super().parse_args(args, namespace)
        finally:
            self._parsing = False

    def error(self, message: str) -> NoReturn:
        hint = f' (see {self.prog} --help)' if self._parsing else ''
        self.exit(USAGE, f'{self.prog}: {message}{hint}\n')

    def existing_config(self, path: str) -> str:
        """Refuse a path that is no file; returns it."""
        if not os.path.isfile(path):
            self.error(f'{path}: no such config')
        return path

    def read_config(self, path: str, options: Mapping[str, Any] | None = None) -> Config:
        """The config with the changes of a command line, or one line about what is wrong."""
        try:
            return read_config(self.existing_config(path), options)
        except ConfigError as error:
            self.error(str(error))

    def existing_checkpoint(self, path: str) -> str:
        """Refuse a path that does not exist; returns it. An address is not looked at."""
        if '://' not in path and not os.path.exists(path):
            self.error(f'{path}: no such checkpoint')
        return path

    def check_least(self, args: argparse.Namespace, **least: int) -> None:
        """Refuse arguments below their least value; None is not given."""
        for name, low in least.items():
            value = getattr(args, name)
            if value is not None and value < low:
                self.error(f'--{name.replace("_", "-")} {value}: must be {low} or more')

    def processes(self, text: str, ranks: int | None) -> list[int]:
        """The numbers in ``4,2,1`` of processes that share ``ranks`` ranks; None: any number."""
        words = [word.strip() for word in text.split(',')]
        if not all(word.isdigit() and 1 <= int(word) <= (ranks or int(word)) for word in words):
            allowed = f'from 1 to {ranks}, the number of ranks' if ranks else 'of 1 or more'
            self.error(f'--processes {text}: must be numbers {allowed}, with commas between them')
        return [int(word) for word in words]

    def make_folder(self, path: str, option: str = '--work-dir') -> str:
        """Make the folder that an option names, unless it is there; returns ``path``."""
        try:
            os.makedirs(path, exist_ok=True)
        except OSError as error:
            self.error(f'{option} {path}: cannot be made: {error.strerror}')
        if not os.access(path, os.W_OK):
            self.error(f'{option} {path}: cannot be written to')
        return path


    def make_folder_of(self, path: str, option: str) -> str:
        """Make the folder of the file that an option names, unless it is there."""
        self.make_folder(os.path.dirname(path) or '.', f'{option} {path}: the folder')
        return path


class Options(DictAction):
    """MMEngine's ``--cfg-options``, with a word for what is not ``KEY=VALUE``."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option: Any = None) -> None:
        for text in values:
            try:
                setting(text)
            except ValueError as error:
                raise argparse.ArgumentError(self, str(error)) from error
        super().__call__(parser, namespace, values, option)


class OptionsAsGiven(Options):
    """Keeps the words as well, as ``options_as_given``: others get them as they are."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option: Any = None) -> None:
        namespace.options_as_given = tuple(values)
        super().__call__(parser, namespace, list(values), option)


def setting(text: str) -> tuple:
    """Key and value of ``KEY=VALUE``; the value is read as MMEngine reads it.

    Raises:
        ValueError: ``text`` has another form, or the value's brackets are not balanced.

    >>> setting('train_cfg.max_epochs=3')
    ('train_cfg.max_epochs', 3)
    """
    key, equals, value = text.partition('=')
    if not equals or not key:
        raise ValueError(f'{text!r} must be KEY=VALUE')
    try:
        return key, DictAction._parse_iterable(value)
    except AssertionError as error:
        raise ValueError(f'{text!r}: the brackets of the value are not balanced') from error
    except RecursionError as error:  # a comma inside of other brackets than ( ) and [ ] of a list
        raise ValueError(f'{text!r}: the value is not a number, a word or a list of them; what '
                         'has dict(...) in it belongs into the config') from error


def quiet_when_reader_leaves(main: Callable[..., int]) -> Callable[..., int]:
    """For a verb that reports: no traceback when it is piped to ``head``."""
    @functools.wraps(main)
    def wrapper(argv: Sequence[str] | None = None) -> int:
        try:
            code = main(argv)
            sys.stdout.flush()
            return code
        except BrokenPipeError:
            try:
                sys.stdout.write('\n')
                sys.stdout.flush()
            except BrokenPipeError:
                pass
            else:  # what broke is another pipe, to a worker process
                raise
            # what is left in the buffer would raise once more when Python ends
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return READER_LEFT
    return wrapper
