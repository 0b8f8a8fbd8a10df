"""What size to buy: the replay is the store's own logic, and the optimum is one."""

from __future__ import annotations

import itertools
import json
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path

import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from kvstore.errors import InvalidArgument
from kvstore.layout import preset
from kvstore.testing.chains import OTHER
from server.cli import app
from server.planning.optimum import best
from server.planning.replay import Replay
from server.planning.sizing import Machine, capacities_of, plan
from server.planning.trace import Request, Trace, parse, read_trace
from server.record import RequestRecord
from tests.server.conftest import ROOT_DIR, SMALL, Fleet, document
from tests.server.test_commands import latentkv

Flags = Callable[..., list[str]]
MOONCAKE = ROOT_DIR.parent / "shared" / "traces" / "mooncake_conversation.jsonl.zst"
OWN = Path(__file__).with_name("trace.jsonl")


def trace_of(*prompts: tuple[int, ...]) -> Trace:
    """A request a second; blocks of 64 tokens and no partial one."""
    return Trace(64, [Request(float(at), 64 * len(blocks), blocks) for at, blocks in enumerate(prompts)])


@st.composite
def traces(draw: st.DrawFn) -> Trace:
    """Prompts that are paths in a small tree, as equal ids mean equal prefixes."""
    names: dict[tuple[int, ...], int] = {}
    paths = draw(st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=4), min_size=1, max_size=9))
    return trace_of(
        *(
            tuple(names.setdefault(tuple(path[: depth + 1]), len(names)) for depth in range(len(path)))
            for path in paths
        )
    )


def exhaustive(trace: Trace, capacity: int) -> int:
    """The most hits that any choice of what to keep can have."""
    reached = {frozenset[int](): 0}
    for request in trace.requests:
        following: dict[frozenset[int], int] = {}
        for kept, hits in reached.items():
            now = hits + sum(1 for _ in itertools.takewhile(kept.__contains__, request.blocks))
            every = kept | set(request.blocks)
            for size in range(min(capacity, len(every)) + 1):
                for choice in map(frozenset, itertools.combinations(every, size)):
                    following[choice] = max(following.get(choice, 0), now)
        reached = following
    return max(reached.values())


@settings(max_examples=40, deadline=None)
@given(trace=traces(), capacity=st.integers(1, 3))
def test_nothing_hits_more_than_the_optimum(trace: Trace, capacity: int) -> None:
    small = Trace(trace.block_tokens, trace.requests[:4])
    assert best(small, capacity).hits == exhaustive(small, capacity)
    for policy in ("unit", "block"):
        assert Replay(capacity, policy, 1).run(trace).hits <= best(trace, capacity).hits


@given(trace=traces(), capacity=st.integers(4, 12))
@settings(max_examples=100, deadline=None)
def test_under_the_policy_block_the_store_is_lru_over_whole_prefixes(trace: Trace, capacity: int) -> None:
    kept: OrderedDict[int, None] = OrderedDict()
    hits = 0
    for request in trace.requests:
        hits += sum(1 for _ in itertools.takewhile(kept.__contains__, request.blocks))
        for block in reversed(request.blocks):
            kept[block] = None
            kept.move_to_end(block)
        while len(kept) > capacity:
            kept.popitem(last=False)
    assert Replay(capacity, "block", 0).run(trace).hits == hits


def test_under_the_policy_unit_only_units_hit() -> None:
    forked = trace_of((1, 2, 3, 4), (1, 2, 5), (1, 2, 6))
    assert Replay(100, "block", 0).run(forked).hits == 4
    assert Replay(100, "unit", 0).run(forked).hits == 2  # the third finds the common prefix of the others
    assert Replay(100, "unit", 2).run(forked).hits == 4  # with a mark every two blocks the second hits, too


def test_a_partial_last_block_does_not_hide_the_end_of_the_input() -> None:
    turns = Trace(64, [Request(0.0, 150, (1, 2, 3)), Request(1.0, 260, (1, 2, 4, 5, 6))])
    assert Replay(100, "unit", 0).run(turns).hits == 2


def test_a_plan_counts_bytes_and_times_for_a_day() -> None:
    trace = trace_of((1, 2), (1, 2), (3, 4), (1, 2), (9,))
    (row,) = plan(trace, [5], Machine(token_bytes=100, prefill_rate=64.0, disk_rate=6400.0), 64).rows
    assert (row.blocks, row.nbytes, row.unit, row.block, row.optimum) == (5, 32000, 4 / 9, 4 / 9, 4 / 9)
    assert row.written_bytes_a_day == pytest.approx(5 * 6400 * 86400 / 4)
    assert row.prefill_seconds_a_day == pytest.approx(4 * 86400 / 4)
    assert row.load_seconds_a_day == pytest.approx(4 * 86400 / 4)
    assert capacities_of(trace, [12800, 1], 100) == [2, 1]


def test_traces_are_read_plain_and_packed_with_and_without_a_header(tmp_path: Path) -> None:
    line = json.dumps({"timestamp": 1500, "input_length": 600, "output_length": 3, "hash_ids": [7, 8]})
    assert parse([line], "x") == Trace(512, [Request(1.5, 600, (7, 8))])
    assert parse(['{"block_tokens": 64}', line], "x").block_tokens == 64
    packed = tmp_path / "trace.jsonl.zst"
    packed.write_bytes(zstandard.compress(line.encode()))
    assert read_trace(packed) == parse([line], "x")
    for bad in ("{}", "[]", '{"timestamp": 1, "input_length": 1, "hash_ids": 3}', "{"):
        with pytest.raises(InvalidArgument, match="x, line 2"):
            parse([line, bad], "x")
    with pytest.raises(InvalidArgument, match="needs a positive block_tokens and a request"):
        parse(['{"block_tokens": 64}'], "x")


def test_the_command_prints_a_table_json_and_a_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    picture = tmp_path / "plan.png"
    made = json.loads(latentkv("plan", str(OWN), "--json", "--png", str(picture), "--sizes", "50MB,1GB"))
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert made["distinct_blocks"] == 8
    assert [row["blocks"] for row in made["rows"]] == [11, 222]
    assert {(row["unit"], row["block"], row["optimum"]) for row in made["rows"]} == {(5 / 15, 7 / 15, 7 / 15)}
    assert "best" in latentkv("plan", str(OWN))
    assert "line 1" in latentkv("plan", str(Path(__file__)), code=2)
    assert "No such file" in latentkv("plan", str(tmp_path / "none"), code=2)
    assert "--sizes 'x'" in latentkv("plan", str(OWN), "--sizes", "x", code=2)


def test_without_a_trace_it_plans_for_what_the_daemon_was_asked(
    fleet: Fleet, flags: Flags, tmp_path: Path
) -> None:
    daemon = fleet.daemon(*flags())
    client = fleet.connect(daemon.url)
    where = ("plan", "--listen", daemon.url)
    assert "has recorded no request" in latentkv(*where, code=2)
    docs = [document(client, blocks, seed=seed) for blocks, seed in ((4, 1), (2, 2), (6, 1), (4, 1))]
    for doc in docs:
        client.match(doc.namespace, doc.hashes, len(doc.tokens))
    client.match(docs[0].namespace, docs[0].hashes, len(docs[0].tokens), counted=64)  # the same request again
    trace = tmp_path / "trace.jsonl"
    made = json.loads(latentkv(*where, "--json", "--sizes", "1GB", "--save", str(trace)))
    assert (made["requests"], made["distinct_blocks"], made["block_tokens"]) == (4, 8, 64)
    assert made["rows"][0]["block"] == 8 / 16
    assert made["rows"][0]["nbytes"] // made["rows"][0]["blocks"] == SMALL.block_bytes
    saved = read_trace(trace)
    assert [request.tokens for request in saved.requests] == [len(doc.tokens) for doc in docs]
    assert saved.requests[0].blocks == saved.requests[2].blocks[:4] == saved.requests[3].blocks
    bigger = CliRunner().invoke(app, [*where, "--json", "--sizes", "1GB", "--model", "tiny"])
    row = json.loads(bigger.stdout)["rows"][0]
    assert row["nbytes"] // row["blocks"] == preset("tiny").block_bytes
    document(client, 1, layout=OTHER)
    unclear = CliRunner().invoke(app, [*where, "--sizes", "1GB"])
    assert unclear.exit_code == 2
    sizes = sorted([SMALL.token_bytes, OTHER.token_bytes])
    assert f"tokens of {sizes} bytes: name one --model" in unclear.stderr
    # What was saved is all that there is of the prompts.
    assert set(json.loads(trace.read_text().splitlines()[1])) == {"timestamp", "input_length", "hash_ids"}


def test_a_record_is_bounded_and_the_oldest_leave() -> None:
    record, none = RequestRecord(1040), RequestRecord(0)
    for number in range(10):
        for each in (record, none):
            each.note(64 * number, bytes(32 * number))
    kept = [request for batch in record.batches(2) for request in batch]
    assert [request.tokens // 64 for request in kept] == [6, 7, 8, 9]
    assert [len(request.ids) for request in kept] == [48, 56, 64, 72]
    assert len(record) == 4
    assert len(none) == 0


@pytest.mark.skipif(not MOONCAKE.exists(), reason="the Mooncake traces are not beside this checkout")
def test_the_mooncake_conversation_has_the_known_rates() -> None:
    trace = read_trace(MOONCAKE)
    distinct = trace.distinct_blocks
    for share, lru, belady in ((0.01, 0.052, 0.243), (0.05, 0.196, 0.366), (0.10, 0.279, 0.366)):
        capacity = int(share * distinct)
        assert Replay(capacity, "block", 0).run(trace).hit_rate == pytest.approx(lru, abs=0.005)
        assert best(trace, capacity).hit_rate == pytest.approx(belady, abs=0.005)
