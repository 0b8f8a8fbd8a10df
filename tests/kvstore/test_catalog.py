import os
import random
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import lmdb
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvstore import catalog as catalog_module
from kvstore.catalog import BlockRecord, Catalog, UnitRecord
from kvstore.directory import lock_directory
from kvstore.errors import DataDirError, DataDirInUse, DiskError, FormatMismatch

MAP = 1 << 20


def block(seed: int) -> BlockRecord:
    rng = random.Random(seed)
    return BlockRecord(
        hash=rng.randbytes(32),
        parent=rng.randbytes(32),
        namespace=rng.randrange(1 << 32),
        depth=rng.randrange(1 << 32),
        place=rng.randrange(1 << 64),
        page=rng.randrange(1 << 32),
        length=rng.randrange(1 << 40),
        codec=rng.randrange(256),
        checksum=rng.randrange(1 << 64),
        used=rng.random() * 2e9,
    )


def unit(seed: int) -> UnitRecord:
    rng = random.Random(seed)
    return UnitRecord(
        hash=rng.randbytes(32),
        namespace=rng.randrange(1 << 32),
        tokens=64 * rng.randrange(1 << 20),
        kinds=rng.randrange(8),
        created=rng.random() * 2e9,
        used=rng.random() * 2e9,
        hits=rng.randrange(1 << 50),
    )


def by_hash(records):
    return sorted(records, key=lambda record: record.hash)


def records(catalog: Catalog) -> list[BlockRecord]:
    """All blocks, as they were committed."""
    return [BlockRecord(*fields) for chunk in catalog.blocks() for fields in chunk.tolist()]


@pytest.fixture
def catalog(tmp_path):
    made = Catalog.open(tmp_path / "catalog", MAP)
    yield made
    made.close()


def reopened(path: Path) -> Catalog:
    return Catalog.open(path / "catalog", MAP)


@contextmanager
def damaging(path: Path, name: bytes) -> Iterator[lmdb.Transaction]:
    """A transaction of somebody else in one database of a closed catalogue."""
    with (
        lmdb.open(str(path / "catalog"), map_size=MAP, max_dbs=4) as env,
        env.begin(write=True, db=env.open_db(name)) as txn,
    ):
        yield txn


def test_records_come_back_exactly_after_reopening(tmp_path):
    catalog = reopened(tmp_path)
    blocks, units = [block(i) for i in range(100)], [unit(i) for i in range(50)]
    catalog.commit(blocks=blocks, units=units)
    catalog.close()
    catalog = reopened(tmp_path)
    assert records(catalog) == by_hash(blocks)
    assert list(catalog.units()) == by_hash(units)
    assert catalog.skipped == 0
    catalog.close()
    catalog.close()


def test_a_commit_drops_first_and_then_puts(catalog):
    old, new = block(1), block(2)
    catalog.commit(blocks=[old], units=[unit(1)])
    catalog.commit(blocks=[old, new], drop_blocks=[old.hash], drop_units=[unit(1).hash, b"unknown" * 4])
    assert records(catalog) == by_hash([old, new])
    assert list(catalog.units()) == []


def test_an_empty_catalogue_has_nothing_and_an_empty_commit_does_nothing(catalog):
    catalog.commit()
    assert records(catalog) == list(catalog.units()) == []


def test_a_commit_that_fails_leaves_nothing_behind(catalog):
    bad = UnitRecord(bytes(32), namespace=1, tokens=1, kinds=1, created=0.0, used=0.0, hits=-1)
    with pytest.raises(catalog_module.struct.error):
        catalog.commit(blocks=[block(1)], units=[bad])
    assert records(catalog) == []


def test_it_grows_by_itself_and_streams_more_than_one_transaction_of_records(tmp_path):
    catalog = Catalog.open(tmp_path / "catalog", 256 << 10)
    blocks = [block(i) for i in range(20_000)]
    for start in range(0, len(blocks), 4000):
        catalog.commit(blocks=blocks[start : start + 4000])
    assert records(catalog) == by_hash(blocks)
    assert len(list(catalog.blocks())) > 1
    catalog.close()
    catalog = Catalog.open(tmp_path / "catalog", 256 << 10)
    catalog.commit(drop_blocks=[one.hash for one in blocks[:19_999]])
    assert records(catalog) == [blocks[-1]]
    catalog.close()


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_damaged_record_is_skipped_and_counted(tmp_path, data):
    path = tmp_path / str(len(list(tmp_path.iterdir())))
    catalog = reopened(path)
    blocks, units = by_hash(block(i) for i in range(5)), by_hash(unit(i) for i in range(5))
    catalog.commit(blocks=blocks, units=units)
    catalog.close()
    for name, victim in ((b"blocks", blocks[2]), (b"units", units[3])):
        with damaging(path, name) as txn:
            value = bytearray(txn.get(victim.hash))
            if data.draw(st.booleans()):
                value[data.draw(st.integers(0, len(value) - 1))] ^= 1 << data.draw(st.integers(0, 7))
            else:
                value = value[: data.draw(st.integers(0, len(value) - 1))]
            txn.put(victim.hash, bytes(value))
            txn.put(b"short key", bytes(value))
    catalog = reopened(path)
    assert records(catalog) == blocks[:2] + blocks[3:]
    assert list(catalog.units()) == units[:3] + units[4:]
    assert catalog.skipped == 4
    catalog.close()


def test_each_tenant_keeps_its_own_secret(tmp_path):
    catalog = reopened(tmp_path)
    tenants = ["a", "b", "", "x" * 4096, "\ud800"]
    secrets = [catalog.tenant_secret(name) for name in tenants]
    assert len(set(secrets)) == 5
    assert {len(secret) for secret in secrets} == {32}
    catalog.close()
    catalog = reopened(tmp_path)
    assert [catalog.tenant_secret(name) for name in tenants] == secrets
    catalog.close()


def test_namespaces_keep_their_ids_and_equal_ones_are_one(tmp_path):
    catalog = reopened(tmp_path)
    digests = [i.to_bytes(32, "big") for i in range(300)]
    ids = [catalog.add_namespace(f'{{"n":{i}}}', digest) for i, digest in enumerate(digests)]
    assert len(set(ids)) == 300
    assert catalog.add_namespace('{"n":7}', digests[7]) == ids[7]
    catalog.close()
    catalog = reopened(tmp_path)
    assert catalog.namespaces() == sorted(
        (number, f'{{"n":{i}}}', digests[i]) for i, number in enumerate(ids)
    )
    catalog.close()


def test_a_damaged_namespace_is_skipped_and_its_id_not_used_again(tmp_path):
    catalog = reopened(tmp_path)
    first, second = catalog.add_namespace("{}", b"a" * 32), catalog.add_namespace("[]", b"b" * 32)
    catalog.close()
    with damaging(tmp_path, b"namespaces") as txn:
        txn.put(second.to_bytes(4, "little"), b"rubbish")
    catalog = reopened(tmp_path)
    assert catalog.namespaces() == [(first, "{}", b"a" * 32)]
    assert catalog.skipped == 1
    assert catalog.add_namespace("[]", b"b" * 32) not in (first, second)
    catalog.close()


def test_another_format_version_is_refused_and_left_alone(tmp_path):
    catalog = reopened(tmp_path)
    catalog.commit(blocks=[block(1)])
    catalog.close()
    with damaging(tmp_path, b"info") as txn:
        txn.put(b"format", b"99")
    for _ in range(2):
        with pytest.raises(FormatMismatch, match=rf"{tmp_path} .* format 99, .* reads format 2; remove"):
            reopened(tmp_path)


@pytest.mark.parametrize("content", [b"rubbish" * 2000, b"x"])
def test_a_catalogue_that_is_no_catalogue_is_refused(tmp_path, content):
    (tmp_path / "catalog").mkdir()
    (tmp_path / "catalog" / "data.mdb").write_bytes(content)
    with pytest.raises(DataDirError, match=str(tmp_path)):
        reopened(tmp_path)


def test_a_truncated_catalogue_is_refused_with_the_remedy(tmp_path):
    catalog = reopened(tmp_path)
    catalog.commit(blocks=[block(i) for i in range(500)])
    catalog.close()
    os.truncate(tmp_path / "catalog" / "data.mdb", 3 * 4096)
    with pytest.raises(DataDirError, match=f"remove {tmp_path} to start empty"):
        reopened(tmp_path)


TRUNCATED = """
import os, sys
from pathlib import Path
from kvstore.catalog import BlockRecord, Catalog
from kvstore.errors import DiskError
path = Path(sys.argv[1])
catalog = Catalog.open(path, 1 << 20)
record = lambda i: BlockRecord(i.to_bytes(32, "big"), bytes(32), 1, 1, i, 5, 100, 0, 7, 1.0)
catalog.commit(blocks=[record(i) for i in range(1000)])
os.truncate(path / "data.mdb", 3 * 4096)
for use in (lambda: list(catalog.blocks()), lambda: catalog.commit(blocks=[record(1)]), catalog.namespaces):
    try:
        use()
    except DiskError:
        print("refused", flush=True)
print("alive", flush=True)
"""


@pytest.mark.parametrize("sectors", [16, 15, 8, 1])
def test_a_catalogue_that_was_never_finished_is_made_anew_unless_there_are_payloads(tmp_path, sectors):
    """Its first pages may be torn when power is lost while it is made."""
    file = tmp_path / "catalog" / "data.mdb"
    file.parent.mkdir()
    file.write_bytes(bytes(512 * sectors))
    reopened(tmp_path).close()
    file.write_bytes(bytes(512 * sectors))
    (tmp_path / "payloads").mkdir()
    with pytest.raises(DataDirError, match="not an LMDB file"):
        reopened(tmp_path)


def test_a_tree_that_leads_back_to_where_it_was_is_refused(tmp_path):
    """As a power loss may leave it where syncs are not kept: the walk over it must end."""
    blocks = by_hash(block(seed) for seed in range(100))
    with closing(reopened(tmp_path)) as catalog:
        catalog.commit(blocks=blocks)
    file = tmp_path / "catalog" / "data.mdb"
    content = bytearray(file.read_bytes())
    first, last = (
        content.index(record.hash + record.pack()) // 4096 * 4096 for record in (blocks[0], blocks[-1])
    )
    content[last + 8 : last + 4096] = content[first + 8 : first + 4096]  # behind the page's number
    file.write_bytes(content)
    with closing(reopened(tmp_path)) as catalog, pytest.raises(DiskError, match="do not rise"):
        records(catalog)


def test_a_catalogue_truncated_while_open_kills_nobody(tmp_path, victim):
    one = victim(TRUNCATED, str(tmp_path / "catalog"))
    lines = [one.line()]
    while lines[-1] == "refused":
        lines.append(one.line())
    assert lines == ["refused"] * (len(lines) - 1) + ["alive"]
    assert len(lines) > 2


def test_a_file_in_the_way_is_a_data_directory_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(DataDirError, match="file"):
        Catalog.open(tmp_path / "file" / "catalog", MAP)
    with pytest.raises(DataDirError, match="file"):
        lock_directory(tmp_path / "file")


READ_ONLY = """
import os, sys
from pathlib import Path
from kvstore.catalog import Catalog
from kvstore.directory import lock_directory
from kvstore.errors import DataDirReadOnly
os.chdir(sys.argv[1])
path = Path()
if os.geteuid() == 0:
    os.setgroups([])
    os.setgid(65534)
    os.setuid(65534)  # root may write anywhere
for use in (lambda: Catalog.open(path / "catalog", 1 << 20), lambda: lock_directory(path)):
    try:
        use()
    except DataDirReadOnly as error:
        print(error, flush=True)
"""


def test_a_read_only_directory_is_refused_as_such(tmp_path, victim):
    path = tmp_path / "data"
    path.mkdir()
    path.chmod(0o555)
    one = victim(READ_ONLY, str(path))
    lines = [one.line(), one.line()]
    path.chmod(0o755)
    assert all("cannot be written" in line and "permissions" in line for line in lines)


HOLDER = """
import sys
from pathlib import Path
from kvstore.directory import lock_directory
lock = lock_directory(Path(sys.argv[1]))
print("locked", flush=True)
sys.stdin.read()
"""


def test_a_directory_has_one_user_and_the_refusal_names_it(tmp_path, victim):
    one = victim(HOLDER, str(tmp_path / "data"))
    assert one.line() == "locked"
    with pytest.raises(DataDirInUse, match=f"in use by process {one.pid}"):
        lock_directory(tmp_path / "data")
    one.kill()
    lock = lock_directory(tmp_path / "data")
    with pytest.raises(DataDirInUse, match=str(os.getpid())):
        lock_directory(tmp_path / "data")
    lock.close()
    lock.close()
    lock_directory(tmp_path / "data").close()


COMMITTER = """
import sys
from pathlib import Path
from kvstore.catalog import BlockRecord, Catalog, UnitRecord
catalog = Catalog.open(Path(sys.argv[1]), 1 << 20)
number = int(sys.argv[2])
while True:
    key = number.to_bytes(32, "big")
    record = BlockRecord(key, bytes(32), 1, 1, number, 5, 100, 0, 7, 1.0)
    catalog.commit(
        blocks=[record],
        units=[UnitRecord(key, 1, 64, 1, 1.0, 1.0, 0)],
        drop_blocks=[(number - 50).to_bytes(32, "big")] if number >= 50 else [],
    )
    print(number, flush=True)
    number += 1
"""


def test_commits_acknowledged_before_a_kill_are_there_and_it_opens_at_once(tmp_path, victim):
    number = 0
    for turn in range(6):
        one = victim(COMMITTER, str(tmp_path / "catalog"), str(number))
        lines = [one.line() for _ in range(1 + 31 * turn)] + one.kill()
        last = int(lines[-1])
        catalog = reopened(tmp_path)
        stored = [record.place for record in records(catalog)]
        units = [int.from_bytes(record.hash, "big") for record in catalog.units()]
        # The one in flight may have made it, but then all of it did.
        assert stored[-1] in (last, last + 1)
        assert units == list(range(stored[-1] + 1))
        assert stored == list(range(max(0, stored[-1] - 49), stored[-1] + 1))
        assert catalog.skipped == 0
        number = stored[-1] + 1
        catalog.close()


def test_a_file_of_another_lmdb_is_refused_and_left_alone(tmp_path):
    Catalog.open(tmp_path / "c", MAP).close()
    file = tmp_path / "c" / "data.mdb"
    data = bytearray(file.read_bytes())
    magic = (0xBEEFC0DE).to_bytes(4, "little")
    at = data.find(magic)
    while at >= 0:  # in both meta pages; the version follows
        data[at + 4] = 77
        at = data.find(magic, at + 4)
    file.write_bytes(data)
    with pytest.raises(DataDirError, match=r"v77 is not supported|another LMDB"):  # by py-lmdb's age
        Catalog.open(tmp_path / "c", MAP)
    assert file.read_bytes() == data
