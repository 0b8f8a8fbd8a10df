"""Sessions that are dropped without being closed, and sessions in forked children."""

import os
import threading
import weakref

import pytest

from kvstore.testing.chains import eventually
from mla.session import Session
from tests.mla.session.conftest import text


def test_a_session_that_is_dropped_stores_what_is_queued_and_ends(model, workers, embedded):
    store = embedded()
    session = Session(model, store)
    session.generate(text(300), max_new_tokens=2)
    dropped = weakref.ref(session)
    del session
    eventually(lambda: dropped() is None)
    eventually(lambda: all(thread.name != "latentkv-store" for thread in threading.enumerate()))
    assert workers(model, store).hit(text(300)) == 256


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_session_in_a_forked_child_waits_for_nothing_and_stores_nothing(model, workers, embedded):
    """As in a DataLoader's worker. It is not asked to compute: torch's own threads are not there either."""
    store = embedded()
    worker = workers(model, store)
    worker.ask(text(200))
    session = worker.session
    queue = session._queue
    child = os.fork()
    if not child:
        code = 1
        try:
            job = queue.job(lambda: b"", epoch=None)
            job.add([bytes(32)], [0], {})
            job.finish()
            job.drop()
            flushed = session.flush(timeout=3600)
            waited = job.wait(timeout=3600)
            counted = queue.counters()
            session.close(timeout=3600)
            code = 0 if (flushed, waited, job.failed, job.over, +counted) == (False, 0, True, True, {}) else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert session.flush()
    session.pool.clear()
    assert worker.hit(text(200)) == 192
