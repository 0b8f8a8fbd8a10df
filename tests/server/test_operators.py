"""What a daemon says of itself: its report, the commands that show it, and the status page in a browser."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from typer.testing import CliRunner

from kvstore.layout import preset
from server.cli import app
from server.commands.status import duration, rate, size
from tests.server.conftest import (
    DEADLINE,
    ROOT_DIR,
    DaemonProcess,
    Document,
    Fleet,
    document,
    flag_maker,
    page_of,
)
from tests.server.test_commands import latentkv
from tests.server.test_failures import until
from tests.server.test_web import get

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
NAME = "<b>acme</b>"  # a tenant who would like to write on the page


@dataclass
class Served:
    daemon: DaemonProcess
    doc: Document


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    """A daemon with a unit of 4 blocks that was hit twice, one of 2 blocks, and prompts that missed."""
    fleet = Fleet()
    with flag_maker() as flags:
        daemon = fleet.daemon(*flags(http="127.0.0.1:0"))
        client = fleet.connect(daemon.url)
        doc, small, unknown = (
            document(client, blocks, seed=seed, tenant=NAME) for seed, blocks in enumerate((4, 2, 3))
        )
        for each in (doc, small):
            each.store(client)
        for _ in range(2):
            assert doc.load(client) == 4
        for each in (doc, unknown):
            client.match(each.namespace, each.hashes, len(each.tokens))
        yield Served(daemon, doc)
        fleet.close()


def test_the_report_is_the_same_on_the_socket_and_on_the_page(served: Served) -> None:
    by_socket = json.loads(latentkv("status", "--listen", served.daemon.url, "--json"))
    by_page = json.loads(get(page_of(served.daemon) + "status.json")[1])
    for report in (by_socket, by_page):
        for moving in ("at", "totals", "history", "counters"):
            report.pop(moving)
    assert by_socket == by_page


def test_the_report_says_who_holds_what_and_what_it_is_worth(served: Served) -> None:
    report = json.loads(get(page_of(served.daemon) + "status.json")[1])
    (namespace,) = report["namespaces"]
    assert (namespace["tenant"], namespace["model"]) == (NAME, "test")
    assert (namespace["blocks"], namespace["host_blocks"], namespace["units"], namespace["hits"]) == (
        6,
        6,
        2,
        2,
    )
    assert namespace["disk_bytes"] == 6 * served.doc.nbytes
    (valued,) = report["most_valuable"]
    assert valued["hash"] == served.doc.hashes[-1][:6].hex()
    assert (valued["tokens"], valued["hits"], valued["saved_tokens"]) == (256, 2, 512)
    assert [unit["tokens"] for unit in report["heaviest"]] == [256, 128]
    assert valued["kinds"] == ["request_end"]
    (tenant,) = report["tenants"]
    assert (tenant["matches"], tenant["matched_tokens"], tenant["miss_tokens"]) == (2, 256, 1 + 193)
    assert (tenant["hit_tokens"], tenant["short_tokens"]) == (2 * 256, 0)  # both loads brought all of it
    assert {miss["reason"]: miss["tokens"] for miss in report["misses"]} == {"none": 1, "never_seen": 193}
    assert [(miss["tokens"], miss["matched_tokens"], miss["reason"]) for miss in report["recent_misses"]] == [
        (193, 0, "never_seen")
    ]
    assert report["why_not"] is None
    assert report["faults"] == []


def test_status_and_top_show_it(served: Served) -> None:
    shown = latentkv("status", "--listen", served.daemon.url)
    assert "ready" in shown
    assert "HOST" in shown
    assert "never_seen" in shown
    assert NAME in shown
    lines = latentkv(
        "top", "--listen", served.daemon.url, "--json", "--looks", "2", "--seconds", "0.1"
    ).splitlines()
    assert [json.loads(line)["units"] for line in lines] == [2, 2]
    assert "DISK" in latentkv("top", "--listen", served.daemon.url, "--looks", "2", "--seconds", "0.1")


def test_a_daemon_that_is_away_is_one_line_and_exit_3(tmp_path: Path) -> None:
    for command in ("status", "top"):
        assert "no daemon answers at" in latentkv(command, "--listen", f"unix://{tmp_path}/kv.sock", code=3)


def test_a_damaged_block_is_a_fault_on_the_report(fleet: Fleet, flags: Callable[..., list[str]]) -> None:
    daemon = fleet.daemon(*flags(http="127.0.0.1:0"))
    client = fleet.connect(daemon.url)
    doc = document(client, 2)
    doc.store(client)
    assert daemon.term() == 0
    for file in Path(flags()[1], "payloads").rglob("data.mdb"):
        with file.open("r+b") as opened:  # in place, for the file has holes
            at = opened.read().index(doc.data(doc.hashes[0])[:64])
            opened.seek(at)
            opened.write(b"damaged!")
    daemon.start()
    client = fleet.connect(daemon.url)
    assert document(client, 2).load(client) == 0
    (fault,) = [
        fault
        for fault in json.loads(get(page_of(daemon) + "status.json")[1])["faults"]
        if fault["event"] == "block_unreadable"
    ]
    assert fault["level"] == "warning"
    assert "kind=checksum_failures" in fault["details"]
    assert "block_unreadable" in latentkv("status", "--listen", daemon.url)


def test_a_daemon_that_drains_says_so_on_its_page_and_answers_no_command(
    fleet: Fleet, flags: Callable[..., list[str]]
) -> None:
    daemon = fleet.daemon(*flags(http="127.0.0.1:0"))
    client = fleet.connect(daemon.url)
    doc = document(client, 24, layout=preset("deepseek-v3", num_layers=30))
    doc.store(client)
    with client.load(doc.namespace, doc.hashes) as load:
        next(iter(load))  # a stream that is open holds the drain up
        daemon.process.terminate()
        daemon.wait_for("event=draining")
        status, report = get(page_of(daemon) + "status.json")
        until(lambda: CliRunner().invoke(app, ["status", "--listen", daemon.url]).exit_code == 3)
    assert (status, json.loads(report)["why_not"]) == (200, "draining: the daemon shuts down")


def test_top_watches_until_it_is_interrupted(fleet: Fleet, flags: Callable[..., list[str]]) -> None:
    daemon = fleet.daemon(*flags())
    command = [sys.executable, "-m", "server", "top", "--listen", daemon.url, "--json", "--seconds", "0.1"]
    # Where the tests run in a shell's background SIGINT is ignored, and what they start would ignore it too.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        started = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT_DIR)
    finally:
        signal.signal(signal.SIGINT, before)
    with started as top:
        assert top.stdout is not None
        looks = [json.loads(top.stdout.readline()) for _ in range(3)]
        top.send_signal(signal.SIGINT)
        assert top.wait(DEADLINE) == 0
    assert [look["tenants"] for look in looks] == [[], [], []]
    shown = CliRunner().invoke(app, ["status", "--listen", daemon.url]).stdout
    assert "HOST" in shown
    assert "tenant" not in shown  # nobody asked for anything yet
    assert "miss reason" not in shown


def test_without_a_flag_the_daemon_is_looked_for_where_serve_would_listen(
    fleet: Fleet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.delenv("LATENTKV_DATA", raising=False)
    done = CliRunner().invoke(app, ["status"])
    assert (
        done.exit_code,
        f"no daemon answers at unix://{tmp_path}/latentkv/latentkv.sock" in done.stderr,
    ) == (
        3,
        True,
    )
    daemon = fleet.daemon("--data", str(tmp_path / "data"), "--host-bytes", "4MiB", "--disk-bytes", "64MiB")
    for words in ([], ["--data", str(tmp_path / "data")]):
        told = json.loads(CliRunner().invoke(app, ["status", "--json", *words]).stdout)
        assert told["address"] == daemon.url


@pytest.mark.parametrize(
    ("told", "text"),
    [
        (size(0), "0 B"),
        (size(1536), "1.5 KiB"),
        (size(3 << 40), "3.0 TiB"),
        (size(5 << 50), "5120.0 TiB"),
        (duration(119), "119 s"),
        (duration(120), "2.0 min"),
        (duration(36 * 3600), "36.0 h"),
        (duration(10 * 86400), "10.0 d"),
        (rate(0, 0), "-"),
        (rate(1, 2), "33.3%"),
    ],
)
def test_figures_are_told_in_the_units_that_people_use(told: str, text: str) -> None:
    assert told == text


@pytest.fixture
def browser() -> str:
    if CHROMIUM is None:
        pytest.skip("needs a Chromium to look at the status page")
    return CHROMIUM


def dump(browser: str, url: str, profile: Path, *flags: str) -> str:
    """The page's document once its script has run, in a browser without network but this machine."""
    done = subprocess.run(
        [
            browser,
            "--headless=new",
            "--no-sandbox",
            "--disable-gpu",
            "--disable-dev-shm-usage",
            f"--user-data-dir={profile}",
            "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
            "--virtual-time-budget=3000",
            *flags,
            url,
        ],
        capture_output=True,
        text=True,
        timeout=2 * DEADLINE,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def test_the_status_page_shows_the_report_in_a_browser(served: Served, browser: str, tmp_path: Path) -> None:
    seen = dump(browser, page_of(served.daemon), tmp_path, "--dump-dom")
    assert 'data-shown="yes"' in seen
    assert '<span id="state" class="good">ready</span>' in seen
    for text in ("HOST", "DISK", "never_seen", "request_end", served.doc.hashes[-1][:6].hex(), "56.9 %"):
        assert text in seen
    assert "&lt;b&gt;acme&lt;/b&gt;" in seen
    assert NAME not in seen
    assert seen.count("<svg") == 2


def test_the_status_page_asks_nobody_else(served: Served) -> None:
    page = get(page_of(served.daemon))[1]
    outside = [part for part in page.split("http")[1:] if not part.startswith("://www.w3.org/2000/svg")]
    assert outside == []
