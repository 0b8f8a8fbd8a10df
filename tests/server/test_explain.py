"""Why a prompt matched no further: each reason brought about against a real daemon, and read everywhere."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from kvstore.api import KVStore, MissReason, ReserveState
from kvstore.client import Client
from kvstore.errors import InvalidArgument, NamespaceUnknown
from kvstore.ghosts import Setback
from kvstore.hashing import ROOT, block_hashes
from kvstore.layout import DType, preset
from kvstore.matching import REASON_OF
from kvstore.namespace import Namespace
from kvstore.observer import Departure
from server.cli import app
from server.commands.daemon import Operator
from server.explaining.reasons import FATES, REASONS
from tests.server.conftest import DaemonProcess, Document, Fleet, document, flag_maker, page_of
from tests.server.test_commands import latentkv
from tests.server.test_failures import until
from tests.server.test_metrics import Samples, scrape
from tests.server.test_web import get

LAYOUT = preset("tiny", num_layers=8)  # 0.6 MB a block
OURS = Namespace(LAYOUT, model="test", tenant="acme")
HALF = (32 << 20) // LAYOUT.block_bytes  # blocks: what one worker may hold of the arena


def explained(*arguments: object, code: int = 0) -> dict[str, Any]:
    """What ``latentkv explain ... --json`` says."""
    ran = CliRunner().invoke(app, ["explain", *map(str, arguments), "--json"])
    assert ran.exit_code == code, ran.output
    answer: dict[str, Any] = json.loads(ran.stdout)
    return answer


def prompt(seed: int, blocks: int) -> list[int]:
    """A prompt of so many blocks and one more token."""
    return [seed, *range(64 * blocks)]


@dataclass
class Scene:
    """A daemon in which a prompt of each reason was asked for once."""

    daemon: DaemonProcess
    client: Client
    namespace: bytes
    prompts: dict[MissReason, list[int]] = field(default_factory=dict)
    samples: Samples = field(default_factory=dict)
    report: dict[str, Any] = field(default_factory=dict)

    def document(self, tokens: list[int]) -> Document:
        return Document(self.namespace, tokens, block_hashes(self.namespace, tokens), LAYOUT.block_bytes)

    def store(self, tokens: list[int]) -> list[int]:
        self.document(tokens).store(self.client)
        return tokens

    def reserve(self, store: KVStore, tokens: list[int]) -> list[ReserveState]:
        """Reserve a prompt's blocks, and leave the lease as it is."""
        answer = store.reserve(self.namespace, ROOT, block_hashes(self.namespace, tokens))
        self.lease = answer.lease
        return [block.state for block in answer.blocks]

    def match(self, tokens: list[int], *, store: bool = False) -> MissReason:
        hashes = block_hashes(self.namespace, tokens)
        return self.client.match(self.namespace, hashes, len(tokens), store=store).reason


def damage(daemon: DaemonProcess, data: Path, block: bytes) -> None:
    """Overwrite a stored block behind a daemon that is down meanwhile."""
    assert daemon.term() == 0
    for file in (data / "payloads").rglob("data.mdb"):
        with file.open("r+b") as opened:  # in place, for the file has holes
            opened.seek(opened.read().index(block[:64]))
            opened.write(b"damaged!")
    daemon.start()


@pytest.fixture(scope="module")
def scene() -> Iterator[Scene]:
    fleet = Fleet()
    with flag_maker() as flags:
        chosen = flags(http="127.0.0.1:0", disk_bytes="16MiB")
        daemon = fleet.daemon(*chosen)
        client = fleet.connect(daemon.url)
        namespace = client.open_namespace(OURS)
        made = Scene(daemon, client, namespace)
        lost = made.document(prompt(1, 2))
        lost.store(client)
        damage(daemon, Path(chosen[1]), lost.data(lost.hashes[0]))
        client.open_namespace(OURS)
        assert lost.load(client) == 0
        made.prompts[MissReason.LOST] = lost.tokens
        bring_about(made, fleet)
        for reason, tokens in made.prompts.items():
            assert made.match(tokens) is reason
        made.samples, made.report = read_all(daemon)
        yield made
        fleet.close()


def bring_about(scene: Scene, fleet: Fleet) -> None:
    """The reasons beside ``LOST``; ``PENDING`` lasts as long as the fleet."""
    prompts, client = scene.prompts, scene.client
    prompts[MissReason.EVICTED] = scene.store(prompt(2, 12))
    scene.store(prompt(3, 12))
    prompts[MissReason.NONE] = scene.store(prompt(4, 2))
    prompts[MissReason.NO_UNIT] = scene.store(prompt(5, 3))[: 2 * 64 + 1]
    short, long = prompt(6, 1), prompt(6, 2)
    scene.store(short)
    scene.store(long)
    prompts[MissReason.DIVERGED] = [*long[:64], *[7] * 65]
    prompts[MissReason.SHORTER_THAN_BLOCK] = [1, 2, 3]
    prompts[MissReason.NEVER_SEEN] = prompt(8, 2)
    prompts[MissReason.NOT_STORED] = prompt(9, 2)
    scene.match(prompts[MissReason.NOT_STORED], store=True)
    prompts[MissReason.FAILED] = prompt(10, 2)
    scene.reserve(client, prompts[MissReason.FAILED])
    client.release(scene.lease)
    prompts[MissReason.REFUSED] = prompt(11, 2)
    greedy = fleet.connect(scene.daemon.url)
    greedy.open_namespace(OURS)
    assert ReserveState.RETRY in scene.reserve(greedy, prompt(12, HALF + 1))
    assert set(scene.reserve(greedy, prompts[MissReason.REFUSED])) == {ReserveState.RETRY}
    greedy.close()
    prompts[MissReason.DELETED] = scene.store(prompt(14, 2))
    with Operator(scene.daemon.url) as daemon:
        daemon.delete("unit", scene.document(prompts[MissReason.DELETED]).hashes[-1].hex())
    prompts[MissReason.PENDING] = prompt(13, 2)
    filling = fleet.connect(scene.daemon.url)
    filling.open_namespace(OURS)
    scene.reserve(filling, prompts[MissReason.PENDING])


def read_all(daemon: DaemonProcess) -> tuple[Samples, dict[str, Any]]:
    _, samples = scrape(page_of(daemon))
    return samples, json.loads(get(page_of(daemon) + "status.json")[1])


Asks = Callable[..., dict[str, Any]]


@pytest.fixture
def ask(scene: Scene, tmp_path: Path) -> Asks:
    """Asks ``explain`` about a prompt."""

    def ask(tokens: list[int], *more: str) -> dict[str, Any]:
        file = tmp_path / "prompt.json"
        file.write_text(json.dumps(tokens))
        chosen = more or ("--namespace", scene.namespace.hex())
        return explained(file, "--listen", scene.daemon.url, *chosen)

    return ask


# These have tests of their own: what brings them about would spoil the rest.
APART = {MissReason.UNAVAILABLE, MissReason.EXPIRED, MissReason.UNKNOWN}  # the last a daemon never says


@pytest.mark.parametrize("reason", sorted(set(MissReason) - APART))
def test_every_reason_is_told_by_explain_the_metric_and_the_status_page(
    reason: MissReason, scene: Scene, ask: Asks
) -> None:
    tokens = scene.prompts[reason]
    found = ask(tokens)
    assert found["reason"] == reason
    assert (found["why"], found["advice"]) == (REASONS[reason].why, REASONS[reason].advice)
    labels = frozenset({"tenant": "acme", "reason": reason.value}.items())
    assert scene.samples["latentkv_miss_tokens_total", labels] >= len(tokens) - found["hit_tokens"]
    assert scene.samples["latentkv_matches_total", labels] >= 1
    assert reason in {each["reason"] for each in scene.report["misses"]}
    if reason is not MissReason.NONE:
        recent = [miss for miss in scene.report["recent_misses"] if miss["reason"] == reason]
        assert recent[0]["tokens"] == len(tokens)
        assert recent[0]["matched_tokens"] == found["hit_tokens"]


def test_a_daemon_that_is_away_is_a_reason_too(tmp_path: Path, fleet: Fleet) -> None:
    nowhere = f"unix://{tmp_path}/kv.sock"
    file = tmp_path / "prompt.json"
    file.write_text("[1]")
    found = explained(file, "--listen", nowhere, code=3)
    assert found["reason"] == MissReason.UNAVAILABLE
    assert "no daemon answers" in latentkv("explain", str(file), "--listen", nowhere, code=3)
    assert fleet.connect(nowhere).match(bytes(32), [], 1).reason is MissReason.UNAVAILABLE


def test_a_block_that_has_expired_is_told(
    tmp_path: Path, fleet: Fleet, flags: Callable[..., list[str]]
) -> None:
    daemon = fleet.daemon(*flags(http="127.0.0.1:0", ttl_seconds=1))
    client = fleet.connect(daemon.url)
    doc = document(client, 2)
    doc.store(client)
    until(lambda: client.match(doc.namespace, doc.hashes, len(doc.tokens)).reason is MissReason.EXPIRED)
    file = tmp_path / "prompt.json"
    file.write_text(json.dumps(doc.tokens))
    found = explained(file, "--listen", daemon.url)
    assert (found["reason"], found["gone"]["why"]) == ("expired", Departure.EXPIRED)
    samples, report = read_all(daemon)
    labels = frozenset({"tenant": "default", "reason": "expired"}.items())
    assert samples["latentkv_miss_tokens_total", labels] == len(doc.tokens)
    assert report["recent_misses"][0]["reason"] == "expired"


@pytest.mark.parametrize(
    ("reason", "fate"),
    [
        (MissReason.EVICTED, Departure.CAPACITY),
        (MissReason.LOST, Departure.CORRUPT),
        (MissReason.DELETED, Departure.DELETED),
        (MissReason.REFUSED, Setback.REFUSED),
        (MissReason.FAILED, Setback.GIVEN_UP),
    ],
)
def test_what_became_of_a_block_is_told_with_when(
    reason: MissReason, fate: str, scene: Scene, ask: Asks
) -> None:
    gone = ask(scene.prompts[reason])["gone"]
    assert gone["why"] == fate
    assert scene.report["started"] < gone["at"] < scene.report["at"]


def test_the_first_block_that_is_missing_is_told_by_its_tokens(scene: Scene, ask: Asks) -> None:
    stop = ask(scene.prompts[MissReason.DIVERGED])["stops_at"]
    assert (stop["block"], stop["token"], stop["last_token"]) == (1, 64, 127)
    assert ask(scene.prompts[MissReason.NONE])["stops_at"] is None


def test_where_the_units_are_is_told(scene: Scene, ask: Asks) -> None:
    found = ask(scene.prompts[MissReason.NO_UNIT])
    assert (found["hit_tokens"], found["stored_tokens"], found["units"]) == (0, 128, [])
    assert found["beyond"] == [192]
    known = ask(scene.prompts[MissReason.DIVERGED])
    assert [unit["tokens"] for unit in known["units"]] == [64]
    assert "request_end" in known["units"][0]["kinds"]
    assert known["beyond"] == [128]


def test_explaining_is_not_counted(scene: Scene, ask: Asks) -> None:
    ask(scene.prompts[MissReason.NONE])
    samples, report = read_all(scene.daemon)
    labels = frozenset({"tenant": "acme", "reason": "none"}.items())
    assert (
        samples["latentkv_matches_total", labels]
        == scene.samples["latentkv_matches_total", labels]
        < report["counters"]["matches"]
    )


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("tenant", {"tenant": "zeta"}),
        ("revision", {"revision": "new weights"}),
        ("rope", {"rope": "yarn"}),
        ("salt", {"salt": "s"}),
        ("layout.dtype", {"layout": replace(LAYOUT, dtype=DType.FP16)}),
    ],
)
def test_a_namespace_that_would_have_matched_is_named_with_what_differs(
    name: str, change: dict[str, Any], scene: Scene, ask: Asks
) -> None:
    scene.client.open_namespace(replace(OURS, **change))
    tokens = scene.prompts[MissReason.NONE]
    own = scene.client.open_namespace(replace(OURS, tenant=f"other {name}", **_without_tenant(change)))
    found = ask(tokens, "--namespace", own.hex()[:16])
    assert found["reason"] == "never_seen"
    (other,) = found["elsewhere"]
    assert (other["stored_tokens"], other["hit_tokens"]) == (128, 128)
    assert other["digest"] == scene.namespace[:6].hex()
    assert name in other["differs"]


def _without_tenant(change: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in change.items() if name != "tenant"}


def test_hits_of_an_exact_session_are_rounded_down_to_its_chunks(scene: Scene, ask: Asks) -> None:
    exact = ("--namespace", scene.namespace.hex(), "--align", "512")
    found = ask(scene.prompts[MissReason.NONE], *exact)
    assert (found["hit_tokens"], found["stored_tokens"]) == (0, 128)


def test_a_trail_of_what_is_no_namespace_or_no_prompt_is_refused(scene: Scene) -> None:
    with Operator(scene.daemon.url) as daemon:
        with pytest.raises(NamespaceUnknown):
            daemon.trail(bytes(32), [], 1, 64)
        with pytest.raises(InvalidArgument):
            daemon.trail(scene.namespace, [bytes(32)], 1, 64)
        with pytest.raises(InvalidArgument):
            daemon.trail(scene.namespace, [], 1 << 60, 64)


def test_a_namespace_that_is_none_is_refused_with_those_that_are_open(scene: Scene, tmp_path: Path) -> None:
    file = tmp_path / "prompt.json"
    file.write_text("[1, 2]")
    wrong = latentkv("explain", str(file), "--listen", scene.daemon.url, "--tenant", "nobody", code=2)
    assert "no open namespace fits" in wrong
    assert f"{scene.namespace[:6].hex()} tenant acme model test" in wrong


def test_it_is_told_to_people_with_the_words_around_the_place(scene: Scene, tmp_path: Path) -> None:
    text = "The known beginning of a document, which two requests have in common. " * 2
    stored = list((text[:128] + "A question").encode())
    scene.store(stored)
    file = tmp_path / "prompt.txt"
    file.write_text(text[:128] + "Something else that is asked of it, enough to fill a block of its own.")
    shown = latentkv(
        *("explain", str(file), "--tokenizer", "bytes", "--listen", scene.daemon.url),
        *("--namespace", scene.namespace.hex()),
    )
    assert "hit 128 tokens" in shown
    assert "(never_seen)" in shown
    assert "tokens 128 to 191" in shown.replace("\n", " ")
    assert "Something else that is asked of it" in shown.replace("\n", " ")


def test_what_became_of_a_block_and_who_has_more_is_told_to_people(scene: Scene, tmp_path: Path) -> None:
    file = tmp_path / "prompt.json"

    def told(tokens: list[int], namespace: bytes) -> str:
        file.write_text(json.dumps(tokens))
        where = ("--listen", scene.daemon.url, "--namespace", namespace.hex())
        ran = CliRunner().invoke(app, ["explain", str(file), *where])
        assert ran.exit_code == 0, ran.output
        return " ".join(ran.stdout.replace("│", " ").split())

    evicted = told(scene.prompts[MissReason.EVICTED], scene.namespace)
    assert f"It was {FATES['capacity']} on 20" in evicted
    whole = scene.prompts[MissReason.NONE]
    assert "The first block that is not stored" not in told(whole, scene.namespace)
    other = scene.client.open_namespace(replace(OURS, salt="told", tenant="told"))
    elsewhere = told(whole, other)
    assert "Other namespaces have more" in elsewhere
    assert f"{scene.namespace[:6].hex()} 128 128 salt told tenant told acme" in elsewhere


def test_every_reason_and_fate_has_its_words() -> None:
    assert set(MissReason) <= set(REASONS)
    assert set(REASON_OF) == {*Departure, *Setback} <= set(FATES)
