"""The daemon's log on standard error: one line an event, whatever stands in it.

A log that cannot be written (a full disk, a terminal that has gone) costs its lines and nothing else.
They are counted, and the first line that gets through again says how many were lost.
"""

from __future__ import annotations

import logging
from types import TracebackType

from kvstore.showing import escaped, field
from server.standard import STDERR, write

_FORMAT = "%(asctime)s level=%(levelname)s logger=%(name)s %(message)s"


def log_to_stderr(level: str) -> None:
    """Write what all loggers say from ``level`` on to standard error."""
    logging.setLogRecordFactory(EventRecord)
    handler = LineHandler(STDERR)
    handler.setFormatter(LineFormatter(_FORMAT))
    logging.basicConfig(level=level.upper(), handlers=[handler])


class EventRecord(logging.LogRecord):
    """A record whose values are told from one another, however it was written.

    ``log.warning("event=lost path=%s reason=%s", path, error)`` quotes what ``event`` would quote.
    """

    def getMessage(self) -> str:  # noqa: N802
        if not str(self.msg).startswith("event=") or not isinstance(self.args, tuple):
            return super().getMessage()
        return str(self.msg) % tuple(
            each if isinstance(each, int | float) else field(each) for each in self.args
        )


class LineFormatter(logging.Formatter):
    """A line for each event. Those of a traceback follow it indented, so that none looks like an event."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802
        return escaped(super().formatMessage(record))

    def formatException(  # noqa: N802
        self,
        ei: tuple[type[BaseException], BaseException, TracebackType | None] | tuple[None, None, None],
    ) -> str:
        lines = super().formatException(ei).split("\n")
        return "\n".join(f"  | {escaped(line)}" for line in lines)


class LineHandler(logging.Handler):
    """Writes each line to a file descriptor at once: nothing stays behind in a buffer to fail at the end."""

    def __init__(self, fd: int) -> None:
        super().__init__()
        self._fd = fd
        self._lost = 0

    def emit(self, record: logging.LogRecord) -> None:
        """See ``logging.Handler``."""
        lines = [record, _loss(self._lost)] if self._lost else [record]
        text = "".join(f"{self.format(line)}\n" for line in reversed(lines))
        # Half a line may stand there from the last attempt.
        self._lost = 0 if write(self._fd, f"\n{text}" if self._lost else text) else self._lost + 1


def _loss(count: int) -> logging.LogRecord:
    said = {"msg": f"event=log_lines_lost count={count}", "levelno": logging.WARNING, "levelname": "WARNING"}
    return logging.makeLogRecord(said | {"name": __name__})
