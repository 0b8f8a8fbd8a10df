"""Rule 3 in the worker: whatever the store does wrong is a miss and a counter, never an error."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TypeVar

log = logging.getLogger(__name__)
Result = TypeVar("Result")


def or_miss(verb: str, work: Callable[[], Result], miss: Result, failed: Callable[[str], None]) -> Result:
    """What ``work`` returns; ``miss`` if it raises, once ``failed`` was told the error's class."""
    try:
        return work()
    except Exception as error:  # noqa: BLE001 - rule 3: a cache is never in the way
        kind = type(error).__name__
        failed(kind)
        log.warning("event=store_failed verb=%s kind=%s reason=%s", verb, kind, error)
        return miss
