"""The verbs through a daemon give back what was stored, whichever way blocks travel."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from kvstore.api import MissReason
from kvstore.layout import preset
from kvstore.remote_load import ByteLoad, MappedLoad
from tests.server.conftest import MODES, Fleet, document, flag_maker, start

Flags = Callable[..., list[str]]
Urls = Callable[[str], str]


@pytest.fixture(scope="module")
def urls() -> Iterator[Urls]:
    """A daemon for each mode, shared by the tests that neither stop nor fill it."""
    fleet, running = Fleet(), {}
    with ExitStack() as stack:

        def url(mode: str) -> str:
            if mode not in running:
                running[mode] = start(fleet, mode, stack.enter_context(flag_maker())).url
            return running[mode]

        yield url
        fleet.close()


@pytest.mark.parametrize("mode", MODES)
def test_stored_blocks_come_back_after_a_restart(mode: str, fleet: Fleet, flags: Flags) -> None:
    daemon = start(fleet, mode, flags)
    client = fleet.connect(daemon.url)
    doc = document(client, 9)
    assert client.match(doc.namespace, doc.hashes, len(doc.tokens), store=True).blocks == 0
    doc.store(client)
    assert doc.load(client) == 9
    assert daemon.term() == 0
    daemon = start(fleet, mode, flags)
    client = fleet.connect(daemon.url)
    doc = document(client, 9)
    match = client.match(doc.namespace, doc.hashes, len(doc.tokens))
    assert (match.blocks, match.disk_blocks, match.reason) == (9, 9, MissReason.NONE)
    assert doc.load(client) == 9
    assert doc.load(client, first=4) == 9


@pytest.mark.parametrize(
    ("mode", "kind"), [("mapped", MappedLoad), ("unix-bytes", ByteLoad), ("tcp-bytes", ByteLoad)]
)
def test_blocks_travel_through_the_arena_only_where_it_can_be_had(
    mode: str, kind: type, fleet: Fleet, urls: Urls
) -> None:
    client = fleet.connect(urls(mode))
    doc = document(client, 2, seed=100)
    doc.store(client)
    with client.load(doc.namespace, doc.hashes) as load:
        assert isinstance(load, kind)


@pytest.mark.parametrize("mode", MODES)
def test_a_document_larger_than_the_arena_passes_through_it(mode: str, fleet: Fleet, urls: Urls) -> None:
    client = fleet.connect(urls(mode))
    # A block is 4.5 MB here, more than gRPC's default for one message.
    doc = document(client, 16, seed=200, layout=preset("deepseek-v3"))
    doc.store(client)
    status = client.status()
    assert doc.nbytes * 16 > status.host.capacity_bytes
    assert doc.load(client) == 16
    assert client.match(doc.namespace, doc.hashes, len(doc.tokens)).blocks == 16


def test_a_view_ends_with_its_step_of_the_iteration(fleet: Fleet, urls: Urls) -> None:
    client = fleet.connect(urls("mapped"))
    doc = document(client, 3, seed=400)
    doc.store(client)
    with client.load(doc.namespace, doc.hashes) as load:
        kept = [block.data for batch in load for block in batch]
    with pytest.raises(ValueError, match="released"):
        bytes(kept[0])


def test_the_status_counts_calls_by_their_outcome(fleet: Fleet, flags: Flags) -> None:
    client = fleet.connect(start(fleet, "mapped", flags).url)
    document(client, 2).store(client)
    status = client.status()
    assert status.counters["rpc_commit_ok"] == 1
    assert (status.disk.blocks, status.units, status.mode, status.namespaces) == (2, 1, "ok", 1)
