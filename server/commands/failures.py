"""How commands end: exit codes, and an error of one line."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import typer

from kvstore.errors import KVStoreError, Unavailable
from kvstore.showing import escaped
from kvstore.wire import DaemonFailed

NO = 1  # the answer is no: not ready, faults found
WRONG = 2  # a wrong argument or setting, or something in the way
AWAY = 3  # the daemon did not answer
BROKEN = 4  # the daemon failed at it, by a fault of its own


@contextlib.contextmanager
def one_line() -> Iterator[None]:
    """Turn what a command may raise into one line on stderr and an exit code."""
    try:
        yield
    except DaemonFailed as error:
        fail(str(error), BROKEN)
    except Unavailable as error:
        fail(str(error), AWAY)
    except KVStoreError as error:
        fail(str(error), WRONG)
    except UnicodeEncodeError as error:  # bytes of an argument
        fail(f"{error.object!r} is no text in UTF-8", WRONG)
    except OSError as error:
        where = f": {error.filename}" if error.filename else ""
        fail(f"{error.strerror or error}{where}", WRONG)


def fail(message: str, code: int) -> None:
    """Say why in one line, and exit."""
    typer.echo(f"latentkv: {escaped(message)}", err=True)
    raise typer.Exit(code)
