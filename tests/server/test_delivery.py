"""What the daemon says of hits: what Match found, and what loads delivered of it."""

from __future__ import annotations

import json
import secrets
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from kvstore.api import KVStore, Readers
from server.commands.daemon import Operator
from tests.server.conftest import DEADLINE, Document, Fleet, document, page_of, start
from tests.server.test_commands import latentkv
from tests.server.test_failures import until
from tests.server.test_metrics import scrape

Flags = Callable[..., list[str]]
BLOCKS, BROKEN = 40, 14


def totals(url: str) -> tuple[int, int, int]:
    """Matched, delivered, fallen short; in tokens."""
    with Operator(url) as operator:
        (tenant,) = operator.report()["tenants"]
    return tenant["matched_tokens"], tenant["hit_tokens"], tenant["short_tokens"]


def damage(daemon_data: str, doc: Document) -> None:
    """Overwrite a block's payload on the disk."""
    needle = doc.data(doc.hashes[BROKEN])
    for path in Path(daemon_data).rglob("*"):
        if not path.is_file():
            continue
        data = path.read_bytes()
        at = data.find(needle[:4096])
        if at >= 0:
            with path.open("r+b") as file:
                file.seek(at)
                file.write(bytes(64))
            return
    raise AssertionError("the block's bytes are in no file")


@pytest.mark.parametrize("mode", ["mapped", "tcp-bytes"])
def test_a_load_that_fell_short_counts_what_it_brought(mode: str, fleet: Fleet, flags: Flags) -> None:
    settings = {"payloads": "slab", "codec": "raw", "http": "127.0.0.1:0"}
    daemon = start(fleet, mode, flags, **settings)
    client = fleet.connect(daemon.url)
    doc = document(client, BLOCKS)
    doc.store(client)
    client.close()
    daemon.term()
    damage(flags()[1], doc)
    daemon.start()
    client = fleet.connect(daemon.url)
    assert document(client, BLOCKS) == doc
    found = client.match(doc.namespace, doc.hashes, len(doc.tokens)).blocks
    assert found == BLOCKS
    assert doc.load(client) == BROKEN
    until(lambda: totals(daemon.url)[1] > 0)
    assert totals(daemon.url) == (64 * BLOCKS, 64 * BROKEN, 64 * (BLOCKS - BROKEN))
    report = json.loads(latentkv("status", "--listen", daemon.url, "--json"))
    assert report["totals"]["hit_tokens"] == 64 * BROKEN
    assert f"{64 * BROKEN:,} of {64 * BLOCKS:,}" in latentkv("status", "--listen", daemon.url)
    _, samples = scrape(page_of(daemon))
    assert sum(value for (name, _), value in samples.items() if name == "latentkv_hit_tokens_total") == (
        64 * BROKEN
    )
    assert samples["latentkv_short_tokens_total", frozenset({"tenant": "default"}.items())] == 64 * (
        BLOCKS - BROKEN
    )


def test_the_readers_of_a_group_are_one_request(fleet: Fleet, flags: Flags) -> None:
    daemon = start(fleet, "mapped", flags)
    clients = [fleet.connect(daemon.url) for _ in range(3)]
    docs = [document(client, BLOCKS) for client in clients]
    docs[0].store(clients[0])
    assert clients[0].match(docs[0].namespace, docs[0].hashes, len(docs[0].tokens)).blocks == BLOCKS
    readers = Readers(secrets.token_bytes(16), 3)

    def read(client: KVStore, doc: Document) -> None:
        with client.load(doc.namespace, doc.hashes, timeout=DEADLINE, readers=readers) as load:
            assert sum(len(batch) for batch in load) == BLOCKS

    threads = [threading.Thread(target=read, args=pair) for pair in zip(clients, docs, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    read(clients[0], docs[0])  # one that comes when the others have ended
    with Operator(daemon.url) as operator:
        (tenant,) = operator.report()["tenants"]
    assert (tenant["hit_tokens"], tenant["loaded_tokens"]) == (64 * BLOCKS, 4 * 64 * BLOCKS)


def test_what_an_earlier_load_was_counted_for_is_not_counted_again(fleet: Fleet, flags: Flags) -> None:
    daemon = start(fleet, "tcp-bytes", flags)
    client = fleet.connect(daemon.url)
    doc = document(client, 10)
    doc.store(client)
    for counted in (0, 4, 10):
        with client.load(doc.namespace, doc.hashes, counted=counted) as load:
            assert sum(len(batch) for batch in load) == 10
    until(lambda: totals(daemon.url) == (0, 64 * 16, 0))


@pytest.mark.parametrize("mode", ["mapped", "tcp-bytes"])
def test_a_worker_that_leaves_early_got_what_it_took(mode: str, fleet: Fleet, flags: Flags) -> None:
    daemon = start(fleet, mode, flags)
    client = fleet.connect(daemon.url)
    doc = document(client, BLOCKS)
    doc.store(client)
    taken = 0
    with client.load(doc.namespace, doc.hashes, first=2) as load:
        for batch in load:
            taken += len(batch)
            break
    until(lambda: client.status().leases == 0)
    matched, hit, short = totals(daemon.url)
    assert (matched, short) == (0, 0)
    assert hit == 64 * taken if mode == "mapped" else hit < 64 * BLOCKS
