"""Two prompts side by side: where they part, and the usual causes told by how they do."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders
from tokenizers.models import BPE

from kvstore.errors import InvalidArgument
from server.explaining.comparison import Comparison, compare
from server.explaining.prompts import ByteTokenizer, FileTokenizer, Prompt, open_tokenizer, read_prompt
from tests.server.test_commands import latentkv

BYTES = ByteTokenizer()
DOCUMENT = "A line of the document that both have.\n" * 12


def compared(ours: str, theirs: str) -> Comparison:
    """Two texts, a token for each byte."""
    return compare(*(Prompt(BYTES.encode(text), BYTES) for text in (ours, theirs)))


def causes(ours: str, theirs: str) -> list[str]:
    return [hint.cause for hint in compared(ours, theirs).hints]


def test_the_shared_prefix_its_share_and_what_differs_are_told() -> None:
    found = compared(DOCUMENT + "Why?" + DOCUMENT, DOCUMENT + "How long?" + DOCUMENT)
    shared = len(DOCUMENT)
    assert found.shared_tokens == shared
    assert found.share == shared / (2 * shared + 4)
    assert found.shared_blocks == found.diverging_block == shared // 64
    assert (found.ours.differs, found.theirs.differs) == ("Why", "How long")
    assert (found.ours.differing_tokens, found.theirs.differing_tokens) == (3, 8)
    assert found.resumes == shared + 1
    assert found.before.endswith("that both have.\n")


def test_without_a_tokenizer_only_the_words_are_missing() -> None:
    found = compare(Prompt([1, 2, 3, *range(100)], None), Prompt([1, 2, 4, *range(100)], None))
    assert (found.shared_tokens, found.resumes, found.before, found.ours.differs) == (2, 100, "", "")
    assert [hint.cause for hint in found.hints] == ["changed_field"]


@pytest.mark.parametrize(
    ("cause", "ours", "theirs"),
    [
        ("timestamp", f"Today is 2026-11-29.\n{DOCUMENT}", f"Today is 2026-11-30.\n{DOCUMENT}"),
        ("timestamp", f"[14:03:59] {DOCUMENT}", f"[14:05:12] {DOCUMENT}"),
        ("timestamp", f"今天是2026年11月29日。{DOCUMENT}", f"今天是2026年11月30日。{DOCUMENT}"),
        (
            "identifier",
            f"request 6f1ed002-ab5b-4bb5-ab5e-1e24e5b7a9c1\n{DOCUMENT}",
            f"request 0c2f3a10-ab5b-4bb5-ab5e-1e24e5b7a9c1\n{DOCUMENT}",
        ),
        ("identifier", f"session call_9f8e7d6c5b: {DOCUMENT}", f"session call_1a2b3c4d5e: {DOCUMENT}"),
        (
            "reordered",
            'tools: [{"name": "search"}, {"name": "read"}, {"name": "write"}]\n' + DOCUMENT,
            'tools: [{"name": "read"}, {"name": "write"}, {"name": "search"}]\n' + DOCUMENT,
        ),
        (
            "reasoning",
            f"{DOCUMENT}<think>It asks why.</think>Because.\nAnd then?",
            f"{DOCUMENT}Because.\nAnd now?",
        ),
        ("whitespace", f"{DOCUMENT}\nWhat now, and why?", f"{DOCUMENT}  What now, and why?"),
        ("extended", DOCUMENT, DOCUMENT + "And then?"),
        ("start_token", DOCUMENT, "\1" + DOCUMENT),
        ("equal", DOCUMENT, DOCUMENT),
    ],
)
def test_a_usual_cause_is_named(cause: str, ours: str, theirs: str) -> None:
    assert causes(ours, theirs) == [cause]
    assert causes(theirs, ours) == [cause]


def test_other_questions_to_one_document_have_no_cause_but_themselves() -> None:
    assert causes(DOCUMENT + "Why does it rain?", DOCUMENT + "How tall is the tower?") == []


def test_reordered_tools_on_lines_of_their_own_are_told_too() -> None:
    assert causes("one tool\nother tool\n" + DOCUMENT, "other tool\none tool\n" + DOCUMENT) == ["reordered"]


@pytest.fixture
def tokenizer(tmp_path: Path) -> Path:
    """A tokenizer.json that knows ``ab`` as one token."""
    made = Tokenizer(BPE({"a": 0, "b": 1, "c": 2, "ab": 3}, [("a", "b")]))
    made.decoder = decoders.Fuse()
    path = tmp_path / "tokenizer.json"
    made.save(str(path))
    return path


def test_an_answer_that_was_tokenised_anew_is_told(tokenizer: Path) -> None:
    reader = FileTokenizer(tokenizer, special=True)
    sampled = Prompt([2, 2, 0, 1, 2], reader)
    reread = Prompt(reader.encode("ccabc"), reader)
    assert reread.tokens == [2, 2, 3, 2]
    assert [hint.cause for hint in compare(sampled, reread).hints] == ["retokenised"]


def test_prompts_are_read_as_token_ids_or_as_text_by_a_tokenizer(tokenizer: Path, tmp_path: Path) -> None:
    ids, text = tmp_path / "ids.json", tmp_path / "text.txt"
    ids.write_text("[2, 3]")
    text.write_text("cab")
    by_file = open_tokenizer(str(tokenizer), special=True)
    assert read_prompt(str(ids), None).tokens == [2, 3]
    assert read_prompt(str(text), by_file).tokens == [2, 3]
    by_directory = open_tokenizer(str(tmp_path), special=True)
    assert read_prompt(str(text), by_directory).tokens == [2, 3]
    assert read_prompt(str(text), open_tokenizer("bytes", special=True)).tokens == [99, 97, 98]
    for content, wrong in (("cab", "give the text's --tokenizer"), ("[]", "no tokens")):
        text.write_text(content)
        with pytest.raises(InvalidArgument, match=wrong):
            read_prompt(str(text), None)
    text.write_bytes(b"\xff")
    with pytest.raises(InvalidArgument, match="nor UTF-8"):
        read_prompt(str(text), by_file)


@pytest.mark.parametrize("content", [None, "{}", "no JSON"])
def test_a_tokenizer_that_is_none_is_refused(content: str | None, tmp_path: Path) -> None:
    file = tmp_path / "tokenizer.json"
    if content is not None:
        file.write_text(content)
    with pytest.raises(InvalidArgument, match="--tokenizer"):
        open_tokenizer(str(file), special=True)


def test_the_command_compares_without_a_daemon(tmp_path: Path) -> None:
    ours, theirs = tmp_path / "ours.txt", tmp_path / "theirs.txt"
    ours.write_text("It is 10:31 now.\n" + DOCUMENT)
    theirs.write_text("It is 10:32 now.\n" + DOCUMENT)
    command = ("explain", str(ours), "--against", str(theirs), "--tokenizer", "bytes")
    found = json.loads(latentkv(*command, "--json"))
    assert (found["shared_tokens"], found["diverging_block"]) == (10, 0)
    assert [hint["cause"] for hint in found["hints"]] == ["timestamp"]
    shown = latentkv(*command)
    assert "10 tokens (2.1%) are shared" in shown
    assert "timestamp: " in shown
    assert "No such file" in latentkv("explain", str(tmp_path / "none"), "--against", "x", code=2)
