"""Memory that is lent: when its view ends, and until when somebody can look at it."""

import gc
import mmap
import threading

import numpy as np
import pytest

from kvstore.ending import end_when_dropped
from kvstore.lending import Lent, memory_under, when_unseen
from kvstore.testing.chains import eventually


def lent(*, readonly: bool = False) -> tuple[mmap.mmap, Lent]:
    memory = mmap.mmap(-1, 8192)
    return memory, Lent(memoryview(memory)[100:200], readonly=readonly)


def test_a_view_that_nobody_looks_at_ends_at_once() -> None:
    _, one = lent()
    assert one.seen
    assert one.end()
    with pytest.raises(ValueError, match="released"):
        one.view[0]


def test_each_way_to_look_keeps_it_in_sight() -> None:
    for look in (lambda view: view[3:5], lambda view: np.frombuffer(view, np.uint8), memoryview):
        _, one = lent()
        kept = look(one.view)
        assert not one.end()
        over = threading.Event()
        when_unseen([one], over.set)
        assert not over.is_set()
        if isinstance(kept, memoryview):
            kept.release()
        del kept
        one.end()
        assert over.wait(30)


def test_the_memory_below_a_view_is_found() -> None:
    for readonly in (False, True):
        memory, one = lent(readonly=readonly)
        assert memory_under(one.view) is memory
        assert one.view.readonly is readonly
    assert memory_under(memoryview(memory)) is memory


def test_what_is_dropped_is_ended_once_in_another_thread() -> None:
    class Owner:
        pass

    owner, ended = Owner(), list[str]()
    end_when_dropped(owner, lambda: ended.append(threading.current_thread().name))
    del owner
    gc.collect()
    eventually(lambda: ended == ["latentkv-end"])
    other = Owner()
    assert end_when_dropped(other, lambda: ended.append("again")).detach() is not None
    del other
    gc.collect()
    assert ended == ["latentkv-end"]
