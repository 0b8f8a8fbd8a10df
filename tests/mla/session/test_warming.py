"""Documents prefilled ahead of time, by the command, with the built-in model."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from torch import nn
from torch.nn.modules.module import register_module_forward_hook
from typer.testing import CliRunner

from kvstore.hashing import block_hashes
from mla.models import load_checkpoint, open_device
from server.cli import app
from server.commands.daemon import Operator
from tests.mla.zoo import save_checkpoint
from tests.server.conftest import ROOT_DIR, Fleet

FILES = 50
BEFORE_KILL = 20


@contextmanager
def forwarded() -> Iterator[list[int]]:
    """Tokens of each forward pass of any model meanwhile."""
    seen: list[int] = []

    def note(module: nn.Module, inputs: Any, output: Any) -> None:
        if isinstance(module, nn.Embedding):
            seen.append(inputs[0].shape[-1])

    hook = register_module_forward_hook(note)
    yield seen
    hook.remove()


def write_documents(directory: Path) -> list[Path]:
    """Texts of 60 to 700 bytes, every third with a beginning in common."""
    chance = random.Random(1)
    letter = "Dear reader, what follows is the same in every letter of ours. " * 3
    for number in range(FILES):
        path = directory / ("letters" if number % 3 == 0 else "other") / f"{number:02}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        own = "".join(chance.choices("abcdefgh ", k=chance.randrange(60, 500)))
        path.write_text(own if number % 3 else letter + own)
    return sorted(directory.rglob("*.txt"))


@dataclass
class Ran:
    lines: list[dict[str, Any]]
    summary: dict[str, Any]

    @property
    def computed(self) -> dict[str, int]:
        return {line["document"]: line["computed_tokens"] for line in self.lines}


def warmed(*arguments: str, code: int = 0) -> Ran:
    ran = CliRunner().invoke(app, ["warm", *arguments, "--json"])
    assert ran.exit_code == code, ran.output
    *lines, summary = map(json.loads, ran.stdout.splitlines())
    return Ran(lines, summary)


def killed(*arguments: str) -> list[dict[str, Any]]:
    """What a run said of its first documents until it was killed."""
    command = [sys.executable, "-m", "server", "warm", *arguments, "--json"]
    few = os.environ | {"OMP_NUM_THREADS": "1"}  # as these tests have it in their own process
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT_DIR, env=few) as process:
        assert process.stdout is not None
        lines = [json.loads(process.stdout.readline()) for _ in range(BEFORE_KILL)]
        process.kill()
    return lines


def units(
    url: str, tenant: str, prompts: list[NDArray[np.uint32]]
) -> list[list[tuple[int, tuple[str, ...]]]]:
    """Where units end on each prompt, and of which kinds."""
    with Operator(url) as daemon:
        (own,) = [each for each in daemon.namespaces() if each.namespace.tenant == tenant]
        found = []
        for tokens in prompts:
            trail = daemon.trail(own.digest, block_hashes(own.digest, tokens), len(tokens), 64)
            found.append([(unit["tokens"], tuple(unit["kinds"])) for unit in trail["units"]])
        return found


def test_a_killed_run_that_is_started_again_ends_as_an_uninterrupted_one_and_prefills_nothing_twice(
    fleet: Fleet, flags: Callable[..., list[str]], tmp_path: Path
) -> None:
    daemon = fleet.daemon(*flags(interval=256))
    files = write_documents(tmp_path / "documents")
    save_checkpoint("deepseek_v3", tmp_path / "model")
    tokenize = load_checkpoint(tmp_path / "model", open_device("cpu")).tokenize
    texts = [tokenize(path.read_bytes()) for path in files]
    where = (str(tmp_path / "documents"), "--listen", daemon.url)
    arguments = (*where, "--model", str(tmp_path / "model"), "--device", "cpu")
    before = killed(*arguments, "--tenant", "cut")
    with forwarded() as seen:
        after = warmed(*arguments, "--tenant", "cut")
    assert sum(seen) == sum(after.computed.values()) == after.summary["computed_tokens"]
    assert all(after.computed[line["document"]] == 0 for line in before)
    whole = warmed(*arguments, "--tenant", "whole")
    computed = sum(line["computed_tokens"] for line in before) + sum(after.computed.values())
    assert computed <= whole.summary["computed_tokens"]
    assert units(daemon.url, "cut", texts) == units(daemon.url, "whole", texts)
    assert all(after.summary[name] == whole.summary[name] for name in ("stored", "tokens", "nbytes"))
    assert (whole.summary["stored"], whole.summary["on_disk"], whole.summary["failed"]) == (FILES, True, [])
    assert whole.summary["saves_seconds"] > 0
    with forwarded() as seen:
        again = warmed(*arguments, "--tenant", "whole")
    assert seen == []
    assert again.summary["saves_seconds"] is None
    assert again.summary["stored_tokens"] == whole.summary["stored_tokens"]


@pytest.mark.parametrize(
    ("arguments", "wrong"),
    [
        (["none", "--model", "tiny"], "is no directory"),
        ([".", "--model", "tiny", "--pattern", "*.none"], "has no file"),
        ([".", "--model", "tiny"], "warm stores through a running daemon"),
    ],
)
def test_what_cannot_be_warmed_is_one_line(arguments: list[str], wrong: str, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("text")
    directory, *rest = arguments
    nowhere = f"unix://{tmp_path}/kv.sock"
    ran = CliRunner().invoke(app, ["warm", str(tmp_path / directory), *rest, "--listen", nowhere])
    assert ran.exit_code in (2, 3)
    assert wrong in ran.stderr
    assert ran.stderr.count("\n") == 1


def test_documents_are_pinned_for_as_long_as_asked(
    fleet: Fleet, flags: Callable[..., list[str]], tmp_path: Path
) -> None:
    daemon = fleet.daemon(*flags())
    save_checkpoint("deepseek_v3", tmp_path / "model")
    (tmp_path / "documents").mkdir()
    for name, length in (("a.txt", 200), ("b.txt", 100), ("short.txt", 10)):
        (tmp_path / "documents" / name).write_text("what is written here " * (length // 20))
    where = (str(tmp_path / "documents"), "--listen", daemon.url)
    made = warmed(*where, "--model", str(tmp_path / "model"), "--device", "cpu", "--pin-for", "2h")
    assert (made.summary["pinned"], made.summary["failed"]) == (2, [])
    with Operator(daemon.url) as operator:
        pins = operator.pins(None)
    assert {pin["unit"] for pin in pins} == {line["unit"] for line in made.lines if line["unit"]}
    assert all(7190 < pin["expires"] - pin["created"] <= 7200 for pin in pins)


def test_people_are_told_what_is_stored_and_what_could_not_be_pinned(
    fleet: Fleet, flags: Callable[..., list[str]], tmp_path: Path
) -> None:
    daemon = fleet.daemon(*flags(pin_share=0))
    save_checkpoint("deepseek_v3", tmp_path / "model")
    (tmp_path / "documents").mkdir()
    for name, times in (("a.txt", 10), ("b.txt", 5)):
        (tmp_path / "documents" / name).write_text("what is written here " * times)
    arguments = (str(tmp_path / "documents"), "--listen", daemon.url, "--model", str(tmp_path / "model"))

    def told(*more: str, code: int) -> str:
        ran = CliRunner().invoke(app, ["warm", *arguments, "--device", "cpu", *more])
        assert ran.exit_code == code, ran.output
        return " ".join(ran.stdout.split())

    first = told("--pin-for", "2h", code=1)
    assert first.startswith("2 of 2 documents are stored: 256 of 315 tokens, ")
    assert "one hit of each will save" in first
    for name in ("a.txt", "b.txt"):
        assert f"failed: {name}: not pinned: " in first
    assert "0 pins keep are too much" in first
    again = told(code=0)
    assert "on disk; 0 were computed in" in again
    assert "one hit of each will save" not in again
    assert "failed" not in again


def test_a_model_that_is_none_and_a_document_that_is_too_long_are_told(
    fleet: Fleet, flags: Callable[..., list[str]], tmp_path: Path
) -> None:
    daemon = fleet.daemon(*flags())
    (tmp_path / "a.txt").write_text("A text of more than sixty-four characters, which is what a block takes.")
    arguments = [str(tmp_path), "--listen", daemon.url]
    ran = CliRunner().invoke(app, ["warm", *arguments, "--model", str(tmp_path)])
    assert (ran.exit_code, ran.stderr.count("\n")) == (2, 1)
    assert "no config.json" in ran.stderr
    (tmp_path / "b.txt").write_bytes(b"x" * ((1 << 18) + 1))
    made = warmed(*arguments, "--model", "tiny", "--device", "cpu", code=1)
    assert (made.summary["documents"], made.summary["stored"]) == (2, 1)
    assert "has 262144 positions" in made.summary["failed"][0]


NO_TEXT = {
    "latin.txt": ("caf\u00e9 " * 30).encode("latin-1"),
    "picture.png": b"\x89PNG\r\n\x1a\n" + bytes(range(256)),
    "utf16.txt": ("a text of its time " * 10).encode("utf-16"),
    "zeros.bin": b"text with a zero\0" * 10,
    "cut.txt": ("\u65e5\u672c\u8a9e" * 40).encode()[:-1],
}


def test_files_that_are_no_text_are_told_counted_and_left_out(
    fleet: Fleet, flags: Callable[..., list[str]], tmp_path: Path
) -> None:
    daemon = fleet.daemon(*flags())
    documents = tmp_path / "documents"
    documents.mkdir()
    for name, content in NO_TEXT.items():
        (documents / name).write_bytes(content)
    (documents / "odd\x1b[31m.bin").write_bytes(b"\xff")
    (documents / "good.txt").write_text("\ufeffwhat is written here, \u65e5\u672c\u8a9e " * 10)
    (documents / "empty.txt").touch()
    arguments = (str(documents), "--listen", daemon.url, "--model", "tiny", "--device", "cpu")
    made = warmed(*arguments, code=1)
    told = dict(line.split(": ", 1) for line in made.summary["no_text"])
    assert set(told) == {*NO_TEXT, "odd\x1b[31m.bin"}
    assert all(why.startswith("no text: byte ") for why in told.values())
    assert "byte 3 (0xe9) is no UTF-8" in told["latin.txt"]
    assert "UTF-16" in told["utf16.txt"]
    assert [line["document"] for line in made.lines] == ["empty.txt", "good.txt"]
    assert (made.summary["documents"], made.summary["failed"]) == (8, [])
    shown = CliRunner().invoke(app, ["warm", *arguments])
    assert shown.exit_code == 1
    text = " ".join(shown.stdout.split())
    assert "6 of the files are no text and were left out" in text
    assert "left out: odd\\x1b[31m.bin: no text" in text
    with Operator(daemon.url) as operator:
        assert len(operator.units(None, "used", 10)) == 1
    for name in told:
        (documents / name).unlink()
    assert warmed(*arguments).summary["no_text"] == []
