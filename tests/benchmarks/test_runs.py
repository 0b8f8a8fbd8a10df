"""Each benchmark once, as small as it goes: that it runs, and that its figures are there."""

import json

import pytest

from benchmarks import churn, concurrency, data_path, restart

WAYS = ("cold", "warm", "store", "write")
KEYS = {
    *(f"{way}_{what}" for way in WAYS for what in ("gbps", "ratio", "ratio_low")),
    *("raw_read_gbps", "memcpy_gbps", "raw_write_gbps"),
    *("match_ms_p50", "match_blocks", "daemon_rss_bytes"),
}


@pytest.fixture
def run(tmp_path):
    def run(benchmark, *options):
        file = tmp_path / "run.json"
        plot = ["--plot", str(tmp_path / "run.png")] if benchmark is not restart else []
        status = benchmark.main([*options, *plot, "--data", str(tmp_path / "data"), "--json", str(file)])
        assert status == 0
        assert not list((tmp_path / "data").iterdir())
        assert not plot or (tmp_path / "run.png").stat().st_size
        return json.loads(file.read_text())

    return run


def test_data_path_measures_each_way_beside_its_limit(run):
    options = [
        "--layout",
        "tiny",
        "--blocks",
        "8",
        "--rounds",
        "1",
        "--arena",
        "128MiB",
        "--payloads",
        "lmdb",
    ]
    figures = run(data_path, *options)
    assert figures.keys() >= KEYS | {"peers"}
    assert all(figures[key] > 0 for key in KEYS)
    assert figures["match_blocks"] == 2048
    assert len(figures["rounds"]) == 1


def test_churn_writes_all_of_the_disk_at_each_turnover(run):
    figures = run(churn, "--layout", "tiny", "--disk", "80MiB", "--turnovers", "2", "--payloads", "lmdb")
    for case in ("one", "mixed"):
        assert [row["turnover"] for row in figures[case]["turnovers"]] == [0, 1, 2]
        assert all(row["nbytes"] > 40 << 20 for row in figures[case]["measured"])


def test_restart_finds_every_block_of_a_document(run):
    figures = run(restart, "--blocks", "2500", "--rounds", "1", "--arena", "64MiB")
    assert figures["first_match_seconds"] > 0
    assert figures["rss_bytes"] > 0


def test_concurrency_counts_what_each_worker_gets(run):
    options = ["--layout", "tiny", "--workers", "1", "--rounds", "1", "--seconds", "1", "--arena", "128MiB"]
    rows = run(concurrency, *options)["workers"]
    assert [row["workers"] for row in rows] == [1]
    assert all(row["gbps"] > 0 and row["match_ms_p50"] > 0 for row in rows)
