"""One structured log line per event: ``event=name key=value ...``."""

from __future__ import annotations

import json
import logging


def event(logger: logging.Logger, level: int, name: str, **fields: object) -> None:
    """Log an event. Values with spaces or quotes are written as JSON strings."""
    if logger.isEnabledFor(level):
        logger.log(level, "%s", " ".join([f"event={name}", *(f"{k}={_value(v)}" for k, v in fields.items())]))


def _value(value: object) -> str:
    text = f"{value:.3f}" if isinstance(value, float) else str(value)
    return text if text and text.isprintable() and not set(text) & set(' "=') else json.dumps(text)
