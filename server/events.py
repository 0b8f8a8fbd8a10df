"""One structured log line per event: ``event=name key=value ...``."""

from __future__ import annotations

import logging

from kvstore.showing import field


def event(logger: logging.Logger, level: int, name: str, **fields: object) -> None:
    """Log an event. Values with spaces, quotes or what is not seen as itself are written as JSON strings."""
    if logger.isEnabledFor(level):
        logger.log(level, "%s", " ".join([f"event={name}", *(f"{k}={field(v)}" for k, v in fields.items())]))
