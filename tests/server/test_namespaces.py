"""Namespaces over the wire: shares by caller, refusals, lists in pages, ids that tell nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from kvstore import wire
from kvstore.errors import InvalidArgument, NamespaceLimit
from kvstore.hashing import ROOT
from kvstore.layout import LatentLayout
from kvstore.namespace import Namespace
from server.commands.daemon import Operator
from tests.server.conftest import SMALL, Fleet, document

Flags = Callable[..., list[str]]


@pytest.fixture
def fleet() -> Iterator[Fleet]:
    fleet = Fleet()
    yield fleet
    fleet.close()


def occupy(client, namespace: Namespace) -> bytes:
    """Open it and hold something in it."""
    digest = client.open_namespace(namespace)
    client.reserve(digest, ROOT, [])
    return digest


def test_a_tenant_that_wants_too_much_is_refused_and_others_are_not(fleet: Fleet, flags: Flags) -> None:
    client = fleet.connect(fleet.daemon(*flags(tenant_namespaces=2, tenant_block_sizes=1)).url)
    for salt in ("a", "b"):
        occupy(client, Namespace(SMALL, tenant="greedy", salt=salt))
    with pytest.raises(NamespaceLimit, match="tenant 'greedy' has 2 namespaces in use"):
        client.open_namespace(Namespace(SMALL, tenant="greedy", salt="c"))
    assert occupy(client, Namespace(SMALL, tenant="other"))
    with pytest.raises(NamespaceLimit, match="tenant 'other' has 1 sizes of blocks in use"):
        client.open_namespace(Namespace(LatentLayout(1, 100, 0), tenant="other"))


def test_a_description_is_bounded_where_it_comes_in(fleet: Fleet, flags: Flags) -> None:
    client = fleet.connect(fleet.daemon(*flags()).url)
    with pytest.raises(InvalidArgument, match="may have 8192"):
        client.open_namespace(Namespace(SMALL, model="m" * 4096, revision="r" * 4096))
    with pytest.raises(InvalidArgument, match=f"send at most {wire.MAX_NAMESPACE_CHARS}"):
        client.open_namespace(Namespace(SMALL, model="\U0001f600" * 4096))


def test_lists_for_operators_are_whole_however_many_there_are(fleet: Fleet, flags: Flags) -> None:
    daemon = fleet.daemon(*flags())
    client = fleet.connect(daemon.url)
    opened = {
        client.open_namespace(Namespace(SMALL, model=f"{number} " + "m" * 3900, revision="r" * 3900))
        for number in range(1100)  # more than goes into a message
    }
    doc = document(client, 2)
    doc.store(client)
    with Operator(daemon.url) as operator:
        assert {each.digest for each in operator.namespaces()} == opened | {doc.namespace}
        assert len(operator.report()["namespaces"]) == 200


def test_lease_ids_tell_nothing_of_others(fleet: Fleet, flags: Flags) -> None:
    client = fleet.connect(fleet.daemon(*flags()).url)
    digest = client.open_namespace(Namespace(SMALL))
    leases = [client._leases[client.reserve(digest, ROOT, []).lease].id for _ in range(64)]
    assert len(set(leases)) == 64
    assert leases != sorted(leases)
    assert max(leases) - min(leases) > 1 << 56
