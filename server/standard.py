"""Standard input, output and error of our processes, which may be closed, full, or a terminal that has gone.

Imports nothing that takes long: ``prepare`` comes before everything else.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Iterator
from io import TextIOWrapper

STDOUT, STDERR = 1, 2
FAILED = 2  # exit code, as server.commands.failures.WRONG


def prepare(arguments: list[str]) -> None:
    """Make a process ready for what may come while it still loads its modules.

    A closed standard file would be given to the next file that is opened, and what is printed would
    land there. A daemon lets SIGHUP pass: what it asks to be read again is still to be read.
    """
    for fd in (0, STDOUT, STDERR):
        try:
            os.fstat(fd)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest number that is free, which is this one
    if arguments[:1] == ["serve"]:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)


def write(fd: int, text: str) -> bool:
    """Write past all buffers, which would fail once more at the exit; whether all of it was written."""
    data = text.encode(errors="backslashreplace")
    try:
        while data:
            data = data[os.write(fd, data) :]
    except OSError:
        return False
    return True


@contextlib.contextmanager
def telling_of_lost_output() -> Iterator[None]:
    """End with one line and exit code 2 when what a command printed could not be written."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # letters that this terminal has not
    try:
        try:
            yield
        finally:
            if sys.stdout is not None:
                sys.stdout.flush()
    except BrokenPipeError:  # who read it has enough
        _let_go_of_stdout()
        raise SystemExit(1) from None
    except OSError as error:
        _let_go_of_stdout()
        where = error.filename or "standard output cannot be written"
        write(STDERR, f"latentkv: {where}: {error.strerror or error}\n")
        raise SystemExit(FAILED) from None


def _let_go_of_stdout() -> None:
    """What is still in its buffer goes nowhere, so that the exit does not fail with it again."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), STDOUT)
