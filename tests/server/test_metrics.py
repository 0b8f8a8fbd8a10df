"""The metrics page of a daemon that has worked: parsed, named by the rules, documented, and right."""

from __future__ import annotations

import json
import re
import urllib.request
from collections.abc import Iterator

import pytest
from prometheus_client.parser import text_string_to_metric_families

from kvstore.api import MissReason
from kvstore.layout import preset
from kvstore.observer import Departure
from server.metrics import COUNTERS, exposition, snapshot
from server.tally import Tally, Worth
from tests.server.conftest import DEADLINE, ROOT_DIR, Fleet, document, flag_maker, page_of
from tests.server.test_web import Flags, get

Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]


def scrape(url: str) -> tuple[dict[str, str], Samples]:
    """Families by name with their type, and samples by name and labels."""
    with urllib.request.urlopen(url + "metrics", timeout=DEADLINE) as answer:
        assert answer.headers["Content-Type"].startswith("text/plain; version=0.0.4")
        return parse(answer.read().decode())


def parse(text: str) -> tuple[dict[str, str], Samples]:
    families = list(text_string_to_metric_families(text))
    assert len({family.name for family in families}) == len(families)
    samples = {(s.name, frozenset(s.labels.items())): s.value for f in families for s in f.samples}
    return {family.name: family.type for family in families}, samples


@pytest.fixture(scope="module")
def scraped() -> Iterator[tuple[dict[str, str], Samples]]:
    """A daemon to which one worker stored 3 blocks that it loaded twice, and asked for others."""
    fleet = Fleet()
    with flag_maker() as flags:
        daemon = fleet.daemon(*flags(http="127.0.0.1:0", prefill_rate=1e-3, gpu_hour_price=3600))
        client = fleet.connect(daemon.url)
        doc = document(client, 3, tenant="acme")
        assert client.match(doc.namespace, doc.hashes, len(doc.tokens)).blocks == 0
        doc.store(client)
        daemon.restart()
        client = fleet.connect(daemon.url)
        doc = document(client, 3, tenant="acme")
        other = document(client, 2, seed=9, tenant="zeta")
        assert client.match(doc.namespace, doc.hashes, len(doc.tokens)).disk_blocks == 3
        assert doc.load(client) == 3
        assert client.match(doc.namespace, doc.hashes, len(doc.tokens)).host_blocks == 3
        assert doc.load(client) == 3
        client.match(other.namespace, other.hashes, len(other.tokens))
        client.close()
        daemon.wait_for("event=worker_gone")  # its loads have ended
        yield scrape(page_of(daemon))
        fleet.close()


def test_the_page_keeps_the_naming_rules(scraped: tuple[dict[str, str], Samples]) -> None:
    families, samples = scraped
    assert all(re.fullmatch(r"latentkv_[a-z0-9_]+", name) for name in families)
    for name, kind in families.items():
        assert not (kind == "counter" and name.endswith("_total"))  # the parser takes it off
        if "seconds" in name or "bytes" in name:
            assert name.endswith(("_seconds", "_bytes"))
    assert all(name.endswith("_total") for (name, _) in samples if families.get(name[:-6]) == "counter")


def test_tokens_are_counted_by_tenant_tier_and_reason(scraped: tuple[dict[str, str], Samples]) -> None:
    _, samples = scraped

    def value(name: str, **labels: str) -> float:
        return samples[f"latentkv_{name}", frozenset(labels.items())]

    for counted in ("matched", "hit"):
        assert value(f"{counted}_tokens_total", tenant="acme", tier="disk") == 192
        assert value(f"{counted}_tokens_total", tenant="acme", tier="host") == 192
    assert value("short_tokens_total", tenant="acme") == 0
    assert value("miss_tokens_total", tenant="acme", reason="none") == 2
    assert value("miss_tokens_total", tenant="zeta", reason="never_seen") == 129
    assert value("matches_total", tenant="zeta", reason="never_seen") == 1
    assert value("loaded_tokens_total", tenant="acme", tier="disk") == 192
    assert value("loaded_tokens_total", tenant="acme", tier="host") == 192
    assert value("requests_total", verb="Match", status="OK") == 3
    # 384 tokens at a thousandth of a token a second, less two short loads, at 1 a second
    assert 0 < 384_000 - value("saved_prefill_seconds_total", tenant="acme") < 2 * DEADLINE
    assert value("saved_money_total", tenant="acme") == value("saved_prefill_seconds_total", tenant="acme")
    assert value("step_size_bytes_sum", step="load") == 2 * value("step_size_bytes_sum", step="disk_read") > 0
    seconds = value("step_duration_seconds_sum", step="load")
    assert value("break_even_prefill_rate", tenant="acme") == pytest.approx(384 / seconds)
    for step, times in {"match": 3, "load": 2, "disk_read": 3}.items():
        assert value("step_duration_seconds_count", step=step) == times
    assert value("units") == 1
    assert value("tier_blocks", tier="disk") == value("tier_blocks", tier="host") == 3


def test_every_metric_is_documented_and_every_documented_metric_exists(
    scraped: tuple[dict[str, str], Samples],
) -> None:
    families, _ = scraped
    table = (ROOT_DIR / "docs" / "metrics.md").read_text()
    documented = dict(re.findall(r"^\| `(\w+)` \| (\w+) \|", table, re.MULTILINE))
    names = {f"{name}_total" if kind == "counter" else name: kind for name, kind in families.items()}
    assert documented == names


def test_what_left_the_disk_is_counted_by_cause_with_age_and_reuse() -> None:
    tally = Tally(Worth())
    tally.block_left(Departure.CAPACITY, 500.0)
    tally.unit_left(Departure.CAPACITY, 90_000.0, 3)
    page = exposition({"default": snapshot(tally, None)}, ready=False, started=0.0)
    _, samples = parse(page.decode())

    def below(name: str, bound: str) -> float:
        return samples[f"latentkv_{name}_bucket", frozenset({"cause": "capacity", "le": bound}.items())]

    assert (below("evicted_block_idle_seconds", "60.0"), below("evicted_block_idle_seconds", "600.0")) == (
        0,
        1,
    )
    assert (below("evicted_unit_age_seconds", "86400.0"), below("evicted_unit_age_seconds", "259200.0")) == (
        0,
        1,
    )
    assert (below("evicted_unit_hits", "2.0"), below("evicted_unit_hits", "5.0")) == (0, 1)
    assert samples["latentkv_ready", frozenset()] == 0


def test_counters_start_at_zero_so_that_their_first_step_is_an_increase(
    scraped: tuple[dict[str, str], Samples],
) -> None:
    _, samples = scraped
    assert all((f"latentkv_{name}_total", frozenset()) in samples for name in COUNTERS)


def test_a_miss_for_what_was_evicted_says_so_to_worker_metrics_and_page(fleet: Fleet, flags: Flags) -> None:
    daemon = fleet.daemon(*flags(http="127.0.0.1:0", disk_bytes="16MiB"))
    client = fleet.connect(daemon.url)
    layout = preset("tiny", num_layers=8)  # 0.6 MB a block
    first, later = (document(client, 12, seed=seed, layout=layout) for seed in (0, 1))
    for each in (first, later):
        each.store(client)
    match = client.match(first.namespace, first.hashes, len(first.tokens))
    assert match.reason is MissReason.EVICTED
    missed = len(first.tokens) - 64 * match.blocks
    _, samples = scrape(page_of(daemon))
    labels = {"tenant": "default", "reason": "evicted"}
    assert samples["latentkv_miss_tokens_total", frozenset(labels.items())] == missed
    gone = samples["latentkv_evicted_block_idle_seconds_count", frozenset({"cause": "capacity"}.items())]
    assert gone == samples["latentkv_disk_evicted_blocks_total", frozenset()] > 0
    report = json.loads(get(page_of(daemon) + "status.json")[1])
    assert report["recent_misses"][0]["reason"] == "evicted"
    assert [each["tokens"] for each in report["misses"] if each["reason"] == "evicted"] == [missed]


def test_a_request_that_is_matched_several_times_is_counted_once(fleet: Fleet, flags: Flags) -> None:
    daemon = fleet.daemon(*flags(http="127.0.0.1:0"))
    client = fleet.connect(daemon.url)
    doc = document(client, 4, tenant="acme")
    doc.store(client)
    length = len(doc.tokens) + 100

    def match(blocks: int, tokens: int, counted: int) -> int:
        return client.match(doc.namespace, doc.hashes[:blocks], tokens, counted=counted).blocks

    # By pieces, as an engine that looks page by page; then again, and for where to leave units.
    assert [match(2, 129, 0), match(4, length, 128), match(4, length, length), match(4, length, length)] == [
        0,
        4,
        4,
        4,
    ]
    _, samples = scrape(page_of(daemon))

    def value(name: str, **labels: str) -> float:
        return samples[f"latentkv_{name}", frozenset({"tenant": "acme", **labels}.items())]

    assert value("matched_tokens_total", tier="host") + value("matched_tokens_total", tier="disk") == 128
    assert sum(v for (n, _), v in samples.items() if n == "latentkv_miss_tokens_total") == 129 + 101
    assert sum(v for (n, _), v in samples.items() if n == "latentkv_matches_total") == 1
