"""Two network namespaces that stand for two machines on one wire.

Each has a host name, an address, an /etc/hosts and a folder of its own. Processes and all other
files are shared.
"""
from __future__ import annotations

import functools
import os
import subprocess
from pathlib import Path

import pytest

INTERFACE = 'wire0'  # of each machine
ADDRESSES = ('10.77.0.1', '10.77.0.2')
NAMES = ('machine0', 'machine1')
LOCAL = '127.0.0.1 localhost\n'
HOSTS = LOCAL + ''.join(f'{address} {name}\n' for address, name in zip(ADDRESSES, NAMES))

# the arguments are name, /etc/hosts, folder, command
_ENTER = 'hostname "$0" && mount --bind "$1" /etc/hosts && cd "$2" && shift 2 && exec "$@"'


def _ip(*arguments: str) -> None:
    subprocess.run(['ip', *arguments], check=True, capture_output=True, text=True)


class Machines:
    """Both machines; :meth:`close` takes them away.

    Args:
        folder: For what belongs to them.
    """

    def __init__(self, folder: Path) -> None:
        self._spaces = [f'mmrepro{os.getpid()}n{number}' for number in (0, 1)]
        self.disks = [folder / name for name in NAMES]
        self._hosts = [folder / f'{name}.hosts' for name in NAMES]
        for number, disk in enumerate(self.disks):
            disk.mkdir(parents=True)
            self.write_hosts(number, HOSTS)
        first, second = self._spaces
        try:
            for space in self._spaces:
                _ip('netns', 'add', space)
            _ip('link', 'add', INTERFACE, 'netns', first, 'type', 'veth', 'peer', 'name', INTERFACE,
                'netns', second)
            for space, address in zip(self._spaces, ADDRESSES):
                _ip('-n', space, 'address', 'add', f'{address}/24', 'dev', INTERFACE)
                for interface in ('lo', INTERFACE):
                    _ip('-n', space, 'link', 'set', interface, 'up')
        except (OSError, subprocess.CalledProcessError):
            self.close()
            raise

    def close(self) -> None:
        for space in self._spaces:
            subprocess.run(['ip', 'netns', 'del', space], capture_output=True)

    def write_hosts(self, number: int, text: str) -> None:
        """Set /etc/hosts of a machine, for what is started from now on."""
        self._hosts[number].write_text(text)

    def command(self, number: int, *command: str, cwd: str | Path | None = None) -> list[str]:
        """Return the command that runs ``command`` on a machine, in the same process.

        ``cwd``: None is the folder of the machine.
        """
        return ['ip', 'netns', 'exec', self._spaces[number], 'unshare', '--uts', '--mount', 'sh',
                '-c', _ENTER, NAMES[number], str(self._hosts[number]),
                str(self.disks[number] if cwd is None else cwd), *command]


@functools.cache
def _refusal(folder: Path) -> str:
    """Return why this machine allows no such machines; '' if it does."""
    machines = None
    try:
        machines = Machines(folder)
        subprocess.run(machines.command(0, 'true'), check=True, capture_output=True, text=True)
    except (OSError, subprocess.CalledProcessError) as error:
        return f'{error} {getattr(error, "stderr", "")}'.strip()
    finally:
        if machines is not None:
            machines.close()
    return ''


def machines_or_skip(tmp_path_factory: pytest.TempPathFactory, folder: Path) -> Machines:
    """Return two machines; skip the test where network namespaces are not permitted."""
    refusal = _refusal(tmp_path_factory.getbasetemp() / 'tried_machines')
    if refusal:
        pytest.skip(f'network namespaces (ip netns, unshare) are not permitted: {refusal}')
    return Machines(folder)
