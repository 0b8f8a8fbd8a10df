"""What alone keeps two requests apart: one row each, against one daemon that serves them all."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import pytest

from kvstore.api import MissReason, ReserveState
from kvstore.client import Client
from kvstore.errors import NamespaceMismatch
from kvstore.hashing import ROOT, block_hashes
from kvstore.layout import DType, LatentLayout
from kvstore.namespace import Namespace
from server.commands.daemon import Operator
from tests.server.conftest import Document, Fleet, flag_maker

LAYOUT = LatentLayout(num_layers=4, latent_rank=32, rope_dim=16, dtype=DType.BF16)
OURS = Namespace(LAYOUT, model="m", revision="fingerprint", tenant="us", rope="{}", adapter="a", salt="s")
IMAGE = {0: b"an image", 2: b"another"}  # extra keys of blocks 0 and 2

# What differs -> the namespace of the others.
ROWS = {
    "adapter id": replace(OURS, adapter="b"),
    "no adapter": replace(OURS, adapter=""),
    "salt": replace(OURS, salt="t"),
    "tenant": replace(OURS, tenant="them"),
    "dtype": replace(OURS, layout=replace(LAYOUT, dtype=DType.FP16)),
    "rope layout": replace(OURS, rope_layout="interleaved"),
    "weights fingerprint": replace(OURS, revision="another fingerprint"),
    "first layer": replace(OURS, layout=replace(LAYOUT, first_layer=4)),
    "last layer": replace(OURS, layout=replace(LAYOUT, num_layers=3)),
    "model name": replace(OURS, model="n"),
}


@dataclass
class Shared:
    """A daemon with our document in it."""

    url: str
    client: Client
    doc: Document

    def listed(self) -> set[str]:
        """Digests, shortened, of the namespaces that are listed with blocks or units."""
        with Operator(self.url) as daemon:
            found = daemon.report()["namespaces"]
        return {each["digest"] for each in found if each["blocks"] or each["units"]}

    def read(self) -> int:
        """Blocks read from the disk so far."""
        return self.client.status().counters.get("disk_read_blocks", 0)


@pytest.fixture(scope="module")
def shared() -> Iterator[Shared]:
    fleet = Fleet()
    with flag_maker() as flags:
        daemon = fleet.daemon(*flags())
        client = fleet.connect(daemon.url)
        namespace = client.open_namespace(OURS)
        tokens = list(range(64 * 4 + 1))
        hashes = block_hashes(namespace, tokens, extra=IMAGE)
        doc = Document(namespace, tokens, hashes, LAYOUT.block_bytes)
        doc.store(client)
        daemon.restart()  # so that whatever is read comes from the disk, and is counted
        yield Shared(daemon.url, client, doc)
        assert doc.load(client) == 4  # after all the rows
        fleet.close()


def require_nothing(shared: Shared, theirs: bytes, hashes: list[bytes]) -> None:
    """Under another digest these hashes name nothing: no hit, and no byte is read."""
    found = shared.client.match(theirs, hashes, len(shared.doc.tokens))
    assert (found.blocks, found.stored_blocks, found.unit, found.reason) == (
        0,
        0,
        None,
        MissReason.NEVER_SEEN,
    )
    before = shared.read()
    with shared.client.load(theirs, hashes) as load:
        assert list(load) == []
        assert load.short == 0
    assert shared.read() == before


@pytest.mark.parametrize("name", ROWS)
def test_requests_that_differ_in_this_alone_share_nothing(shared: Shared, name: str) -> None:
    client, doc = shared.client, shared.doc
    theirs = client.open_namespace(ROWS[name])
    hashes = block_hashes(theirs, doc.tokens, extra=IMAGE)
    assert not {theirs, *hashes} & {doc.namespace, *doc.hashes}
    require_nothing(shared, theirs, hashes)
    require_nothing(shared, theirs, doc.hashes)  # not even by hashes that were stolen
    with pytest.raises(NamespaceMismatch):
        client.reserve(theirs, ROOT, doc.hashes)
    answer = client.reserve(theirs, ROOT, hashes)  # nothing of ours is present for them
    assert {block.state for block in answer.blocks} == {ReserveState.FILL}
    client.release(answer.lease)
    assert shared.listed() == {doc.namespace[:6].hex()}


def test_requests_that_differ_in_extra_keys_alone_share_nothing_from_there_on(shared: Shared) -> None:
    client, doc = shared.client, shared.doc
    for extra, common in (({}, 0), ({0: b"one more"}, 0), (IMAGE | {2: b"one more"}, 2)):
        hashes = block_hashes(doc.namespace, doc.tokens, extra=extra)
        found = client.match(doc.namespace, hashes, len(doc.tokens))
        assert (found.blocks, found.stored_blocks) == (0, common)
        with client.load(doc.namespace, hashes) as load:
            assert sum(len(batch) for batch in load) == common
            assert load.short == common


def test_the_same_in_everything_shares_everything(shared: Shared) -> None:
    again = shared.client.open_namespace(replace(OURS))
    assert again == shared.doc.namespace
    hashes = block_hashes(again, shared.doc.tokens, extra=IMAGE)
    assert shared.client.match(again, hashes, len(shared.doc.tokens)).blocks == 4
