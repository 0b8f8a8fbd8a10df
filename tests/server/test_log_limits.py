"""What peers can make happen as often as they like does not hide what matters."""

from __future__ import annotations

import logging

import pytest

from server import events
from server.events import LINES, Occasional, event
from server.faults import KEPT_FAULTS, KEPT_OF_ONE_EVENT, FaultLog

log = logging.getLogger(__name__)


def test_an_event_is_logged_so_many_times_and_then_counted(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    occasional = Occasional(log)
    for number in range(LINES + 90):
        occasional.event(logging.WARNING, "knocked", who=number)
    occasional.event(logging.WARNING, "burnt")
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == LINES + 1
    assert "further" in lines[LINES - 1]
    assert lines[-1] == "event=burnt"
    monkeypatch.setattr(events, "SECONDS", -1.0)  # a minute later
    occasional.event(logging.WARNING, "knocked", who=0)
    assert caplog.records[-1].getMessage() == "event=knocked who=0 left_out=90"


def test_a_level_that_is_not_logged_counts_nothing(caplog: pytest.LogCaptureFixture) -> None:
    occasional = Occasional(log)
    caplog.set_level(logging.ERROR)
    for _ in range(LINES + 1):
        occasional.event(logging.INFO, "knocked")
    caplog.set_level(logging.INFO)
    occasional.event(logging.INFO, "knocked")
    assert [record.getMessage() for record in caplog.records] == ["event=knocked"]


def test_a_fault_that_comes_often_leaves_room_for_others() -> None:
    faults, logger = FaultLog(), logging.getLogger("tests.faults")
    logger.addHandler(faults)
    event(logger, logging.ERROR, "disk_failed", reason="once")
    for number in range(1000):
        event(logger, logging.WARNING, "worker_refused", pid=number)
    for number in range(2 * KEPT_FAULTS):
        event(logger, logging.WARNING, f"other{number % 2}", number=number)
    kept = faults.recent()
    logger.removeHandler(faults)
    assert "disk_failed" in {fault.event for fault in kept}
    refused = [fault.details for fault in kept if fault.event == "worker_refused"]
    assert refused == [f"pid={number}" for number in range(999, 999 - KEPT_OF_ONE_EVENT, -1)]
    assert len(kept) <= KEPT_FAULTS
