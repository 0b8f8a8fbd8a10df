"""Names are shown as they are and obeyed by nobody: each command and page that shows one, before a daemon."""

from __future__ import annotations

import contextlib
import json
import tomllib
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families
from typer.testing import CliRunner

import kvstore
from kvstore.embedded import Embedded
from kvstore.errors import InvalidArgument
from kvstore.namespace import Namespace
from kvstore.settings import StoreSettings
from kvstore.showing import escaped, field, shown
from server.cli import app
from tests.server.conftest import SMALL, DaemonProcess, Document, Fleet, document, flag_maker, page_of

# What markup, a shell, a query, a page or a log would read otherwise, and a screen shows as it is.
NAMES = (
    "[acme]",
    "x[/bold]y",
    "[link=file:///etc/passwd]z[/link]",
    ":bomb:",
    "two words",
    'say "no"',
    "back\\slash\\n",
    "<script>alert(1)</script>",
    'a"} 1\\nfake{b="',
    "x event=stopped level=ERROR",
    "日本語",
    "%s%d{0}",
)
# What is refused where it comes in.
UNSEEN = {
    "escape sequence": "\x1b[31mred",
    "bell": "ding\a",
    "new line": "a\nlevel=ERROR event=fake",
    "carriage return": "a\rb",
    "tab": "a\tb",
    "zero byte": "a\0b",
    "C1 control": "a\x9b31mb",
    "right to left override": "a\u202eb",
    "isolate": "a\u2066b",
    "zero width space": "a\u200bb",
    "line separator": "a\u2028b",
    "byte order mark": "\ufeffa",
    "filler": "\u3164",
    "lone surrogate": "a\ud800b",
    "tag": "a\U000e0041b",
    "no character": "a\uffffb",
}


@pytest.fixture(scope="module")
def told() -> Iterator[tuple[DaemonProcess, dict[str, Document]]]:
    """A daemon that holds a document of each tenant and model, and has answered a request of each."""
    with flag_maker() as flags:
        fleet = Fleet()
        quotas = json.dumps(dict.fromkeys(NAMES, "10MiB"))
        daemon = fleet.daemon(*flags(http="127.0.0.1:0", tenant_quotas=quotas))
        client = fleet.connect(daemon.url)
        documents = {}
        for name in NAMES:
            documents[name] = doc = document(client, 2, tenant=name)
            doc.store(client)
            client.match(doc.namespace, doc.hashes, len(doc.tokens), counted=1)
            doc.load(client)
        yield daemon, documents
        fleet.close()


def ran(*words: str) -> str:
    result = CliRunner().invoke(app, words, env={"COLUMNS": "400", "TERM": "dumb"})
    assert result.exit_code == 0, (result.output, result.exception)
    return result.stdout


@pytest.mark.parametrize(
    "command", [("units", "list"), ("status",), ("top", "--looks", "2", "--seconds", "0.1")], ids=" ".join
)
def test_tables_show_each_name_as_it_is(
    command: tuple[str, ...], told: tuple[DaemonProcess, dict[str, Document]]
) -> None:
    text = ran(*command, "--listen", told[0].url)
    for name in NAMES:
        assert name in text


@pytest.mark.parametrize("name", NAMES)
def test_one_name_is_found_and_shown(name: str, told: tuple[DaemonProcess, dict[str, Document]]) -> None:
    daemon, _ = told
    where = ("--listen", daemon.url)
    (unit,) = json.loads(ran("units", "list", "--tenant", name, "--json", *where))
    assert unit["tenant"] == name
    assert name in ran("units", "show", unit["unit"], *where)
    pin = json.loads(ran("units", "pin", unit["unit"], "--for", "1h", "--json", *where))
    assert pin["handle"] in ran("units", "list", "--pins", "--tenant", name, *where)
    ran("units", "unpin", pin["handle"], *where)


def test_explain_shows_the_namespace_and_what_differs_in_others(
    told: tuple[DaemonProcess, dict[str, Document]], tmp_path: Path
) -> None:
    daemon, documents = told
    first = NAMES[0]
    prompt = tmp_path / "prompt.json"
    prompt.write_text(json.dumps(documents[first].tokens))
    text = ran("explain", str(prompt), "--tenant", first, "--listen", daemon.url)
    assert f"tenant {first}, model test" in text
    # In a namespace without blocks, all of the others have more.
    fleet = Fleet()
    try:
        fleet.connect(daemon.url).open_namespace(Namespace(SMALL, model="test", tenant="[/none]"))
    finally:
        fleet.close()
    text = ran("explain", str(prompt), "--tenant", "[/none]", "--listen", daemon.url)
    for name in NAMES:
        assert name in text
    refused = CliRunner().invoke(app, ["explain", str(prompt), "--listen", daemon.url])
    assert refused.exit_code == 2
    assert all(name in refused.stderr for name in NAMES)


def test_pages_show_each_name_as_it_is(told: tuple[DaemonProcess, dict[str, Document]]) -> None:
    page = page_of(told[0])
    with urllib.request.urlopen(f"{page}status.json") as answer:
        report = json.load(answer)
    assert {each["tenant"] for each in report["tenants"]} >= set(NAMES)
    with urllib.request.urlopen(f"{page}metrics") as answer:
        families = list(text_string_to_metric_families(answer.read().decode()))
    tenants = {
        each.labels["tenant"] for family in families for each in family.samples if "tenant" in each.labels
    }
    assert tenants >= set(NAMES)
    with urllib.request.urlopen(page) as answer:
        text = answer.read().decode()
    assert "innerHTML" not in text
    assert "document.write" not in text


def test_settings_show_each_name_as_it_is() -> None:
    quotas = json.dumps(dict.fromkeys(NAMES, "10MiB"))
    text = ran("config", "show", "--data", "/d[bold]", "--tenant-quotas", quotas)
    assert "/d[bold]" in text
    assert all(repr(name)[1:-1] in text for name in NAMES)


@pytest.mark.parametrize("part", ["tenant", "model", "revision", "adapter", "salt", "rope", "numerics"])
def test_what_is_not_seen_as_itself_is_refused_where_it_comes_in(
    part: str, told: tuple[DaemonProcess, dict[str, Document]], tmp_path: Path
) -> None:
    settings = StoreSettings(tmp_path, host_bytes=1 << 20, disk_bytes=16 << 20)
    with contextlib.closing(kvstore.connect(told[0].url)) as client, Embedded(settings) as embedded:
        for kind, text in UNSEEN.items():
            for store in (client, embedded):
                with pytest.raises(InvalidArgument, match=f"{part}=") as refused:
                    store.open_namespace(Namespace(SMALL, **{part: text}))
                assert str(refused.value).isprintable(), kind
        assert embedded.status().namespaces == 0


@pytest.mark.parametrize("part", ["tenant", "model", "salt"])
def test_what_utf8_cannot_say_is_in_no_namespace(part: str) -> None:
    raw = json.loads(Namespace(SMALL).to_json()) | {part: "a\ud800b"}
    with pytest.raises(InvalidArgument, match=f"{part}=.* is no text in UTF-8"):
        Namespace.from_json(json.dumps(raw))


@pytest.mark.parametrize("kind", UNSEEN)
def test_text_from_elsewhere_is_one_line_without_orders(kind: str) -> None:
    text = UNSEEN[kind]
    for told in (escaped(text), shown(text), field(text)):
        assert told.isprintable()
        told.encode()
        assert not set("\u3164") & set(told)
    assert json.loads(field(text)) == text


def test_a_name_with_spaces_at_its_ends_is_quoted() -> None:
    assert shown(" acme") == '" acme"'
    assert shown("acme") == "acme"


@pytest.mark.parametrize(
    "words",
    [
        ("units", "list", "--tenant", "a\udcff"),
        ("units", "show", "a\udcff"),
        ("units", "unpin", "\x1b[31m"),
        ("units", "delete", "--yes", "--tenant", "a\udcff"),
        ("explain", "-", "--model", "a\udcff"),
        ("check", "/nowhere\x1b[31m\n\udcff"),
        ("bench", "/nowhere\x1b[31m\n\udcff"),
        ("warm", "/nowhere\x1b[31m\n\udcff", "--model", "tiny"),
        ("config", "show", "--data", "/d", "--listen", "\x1b[31m\n"),
        ("serve", "--config", "/nowhere\x1b[31m\n\udcff"),
        ("plan", "/nowhere\x1b[31m\n\udcff"),
        ("token", "\x1b[31m", "--out", "/nowhere/t", "--tenants", "a"),
        ("token", "a", "--out", "/nowhere/t", "--tenants", "a\n[[credential]]"),
    ],
    ids=lambda words: " ".join(words[:2]).encode("ascii", "backslashreplace").decode(),
)
def test_a_message_about_odd_text_is_one_plain_line(
    words: tuple[str, ...], told: tuple[DaemonProcess, dict[str, Document]]
) -> None:
    asks = words[0] in ("units", "explain")
    listen = ("--listen", told[0].url) if asks else ()
    result = CliRunner().invoke(app, [*words, *listen], input="[1, 2]")
    assert result.exit_code == 2, (result.output, result.exception)
    assert result.stderr.startswith("latentkv: ")
    assert result.stderr.count("\n") == 1
    assert result.stderr.rstrip("\n").isprintable()


def test_a_token_entry_is_toml_whatever_the_tenants_are_called(tmp_path: Path) -> None:
    named = [name for name in NAMES if "," not in name]
    text = ran("token", "t", "--out", str(tmp_path / "t"), "--tenants", ",".join(named))
    (entry,) = tomllib.loads(text)["credential"]
    assert entry["tenants"] == named
