"""A checkpoint's files name it by their content, which is read once."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path

import numpy as np
import pytest

from mla import Unsupported
from mla.adapters.checkpoint import checkpoint_directory, checkpoint_revision, file_revision, loading
from mla.file_sums import cache_directory, checkpoint_fingerprint
from tests.mla.zoo import build, save_checkpoint

HOUR = 3600


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache directory of this test's own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "latentkv" / "files"


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    directory = tmp_path / "model"
    save_checkpoint("deepseek_v3", directory)
    return directory


def settle(monkeypatch: pytest.MonkeyPatch) -> None:
    """Times that are remembered at once, as if a while had passed."""
    monkeypatch.setattr("mla.file_sums._SETTLED", -1.0)


def read_files(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Names of files that were read since the last call."""
    found = [Path(record.args[0]).name for record in caplog.records if record.msg.startswith("read %s")]
    caplog.clear()
    return sorted(found)


def test_every_byte_of_every_weight_file_counts(checkpoint):
    name = checkpoint_fingerprint(checkpoint)
    path = checkpoint / "model.safetensors"
    content = bytearray(path.read_bytes())
    seen = {name}
    places = np.random.default_rng(1).integers(0, len(content), 20)
    for place in [0, len(content) - 1, *places.tolist()]:
        content[place] ^= 1
        path.write_bytes(content)
        seen.add(checkpoint_fingerprint(checkpoint))
        content[place] ^= 1
    assert len(seen) == 23
    path.write_bytes(content)
    assert checkpoint_fingerprint(checkpoint) == name


def test_three_rows_of_the_embedding_and_all_layernorms_count(tmp_path):
    model = build("deepseek_v3")
    model.save_pretrained(tmp_path / "one")
    model.get_input_embeddings().weight.data[5:8] += 1
    model.save_pretrained(tmp_path / "two")
    for name, weight in model.named_parameters():
        if "norm" in name:
            weight.data *= 1.1
    model.save_pretrained(tmp_path / "three")
    assert len({checkpoint_fingerprint(tmp_path / name) for name in ("one", "two", "three")}) == 3


@pytest.mark.parametrize(
    "name", ["config.json", "adapter_config.json", "hf_quant_config.json", "modeling_own.py", "extra.pth"]
)
def test_what_changes_the_model_counts_too(checkpoint, name):
    (checkpoint / name).write_text('{"lora_alpha": 8}')
    before = checkpoint_fingerprint(checkpoint)
    (checkpoint / name).write_text('{"lora_alpha": 9}')
    assert checkpoint_fingerprint(checkpoint) != before


@pytest.mark.parametrize(
    "name", ["tokenizer.json", "generation_config.json", "README.md", "chat_template.json"]
)
def test_what_does_not_change_it_does_not_count(checkpoint, name):
    before = checkpoint_fingerprint(checkpoint)
    (checkpoint / name).write_text("{}")
    assert checkpoint_fingerprint(checkpoint) == before


def test_where_a_checkpoint_lies_does_not_count(checkpoint, tmp_path):
    before = checkpoint_fingerprint(checkpoint)
    assert checkpoint_fingerprint(checkpoint.rename(tmp_path / "moved")) == before


def test_files_are_read_once_and_again_when_they_have_changed(checkpoint, caplog, monkeypatch):
    settle(monkeypatch)
    caplog.set_level("INFO", "mla.file_sums")
    name = checkpoint_fingerprint(checkpoint)
    assert read_files(caplog) == ["config.json", "model.safetensors"]
    assert checkpoint_fingerprint(checkpoint) == name
    assert read_files(caplog) == []
    path = checkpoint / "model.safetensors"
    before = path.stat()
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)  # of equal size, and with its old time put back
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert checkpoint_fingerprint(checkpoint) != name
    assert read_files(caplog) == ["model.safetensors"]


def test_a_file_that_was_just_written_is_not_remembered(checkpoint, caplog, monkeypatch):
    monkeypatch.setattr("mla.file_sums._SETTLED", HOUR)
    caplog.set_level("INFO", "mla.file_sums")
    checkpoint_fingerprint(checkpoint)
    read_files(caplog)
    checkpoint_fingerprint(checkpoint)
    assert read_files(caplog) == ["config.json", "model.safetensors"]


@pytest.mark.parametrize(
    "rubbish",
    [b"", b"\xff\x00", b"[]", b"null", b'{"xxh3_128": 7}', b"[" * 100_000, b'{"path": "elsewhere"}'],
)
def test_rubbish_among_what_is_remembered_is_as_good_as_nothing(checkpoint, cache, monkeypatch, rubbish):
    settle(monkeypatch)
    name = checkpoint_fingerprint(checkpoint)
    remembered = list(cache.iterdir())
    assert len(remembered) == 2
    for path in remembered:
        path.write_bytes(rubbish)
    assert checkpoint_fingerprint(checkpoint) == name
    assert all(json.loads(path.read_bytes())["xxh3_128"] for path in cache.iterdir())


def test_what_is_remembered_of_another_file_is_not_taken(checkpoint, cache, monkeypatch):
    settle(monkeypatch)
    name = checkpoint_fingerprint(checkpoint)
    first, second = sorted(cache.iterdir())
    one, other = first.read_bytes(), second.read_bytes()
    first.write_bytes(other)
    second.write_bytes(one)
    assert checkpoint_fingerprint(checkpoint) == name


def test_a_cache_that_cannot_be_written_costs_a_reading(checkpoint, tmp_path, monkeypatch):
    settle(monkeypatch)
    name = checkpoint_fingerprint(checkpoint)
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert checkpoint_fingerprint(checkpoint) == name
    assert checkpoint_fingerprint(checkpoint) == name


def test_the_oldest_of_what_is_remembered_goes(checkpoint, cache, monkeypatch):
    settle(monkeypatch)
    monkeypatch.setattr("mla.file_sums._REMEMBERED", 10)
    for index in range(30):
        (checkpoint / f"part{index}.bin").write_bytes(bytes([index]))
    checkpoint_fingerprint(checkpoint)
    assert len(list(cache.glob("*.json"))) <= 10 + 4  # a few at a time, for they are read at the same time


def test_the_cache_lies_in_the_home_by_default(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")  # not allowed by the standard
    assert cache_directory() == tmp_path / ".cache" / "latentkv" / "files"


def hub(root: Path, content: bytes) -> Path:
    """A model as the hub's cache has it."""
    model = root / "models--org--name"
    snapshot, blobs = model / "snapshots" / "abc", model / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for name, data, digest in (
        ("model.safetensors", content, hashlib.sha256(content).hexdigest()),
        ("config.json", b"{}", hashlib.sha1(b"{}").hexdigest()),
    ):
        (blobs / digest).write_bytes(data)
        (snapshot / name).symlink_to(Path("../../blobs") / digest)
    return snapshot


def test_links_to_the_hubs_blobs_are_named_by_them_and_not_read(tmp_path, caplog):
    caplog.set_level("INFO", "mla.file_sums")
    one = checkpoint_fingerprint(hub(tmp_path / "one", b"weights"))
    assert one == checkpoint_fingerprint(hub(tmp_path / "two", b"weights"))
    assert one != checkpoint_fingerprint(hub(tmp_path / "three", b"others"))
    assert read_files(caplog) == []


def test_other_links_are_read(tmp_path, caplog):
    caplog.set_level("INFO", "mla.file_sums")
    directory, blobs = tmp_path / "model", tmp_path / "blobs"
    directory.mkdir()
    blobs.mkdir()
    (blobs / ("0" * 64)).write_bytes(b"not what it says")
    (directory / "model.safetensors").symlink_to(blobs / ("0" * 64))
    checkpoint_fingerprint(directory)
    assert read_files(caplog) == ["model.safetensors"]


def test_a_directory_without_weights_is_refused(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(Unsupported, match="no weight file"):
        checkpoint_fingerprint(tmp_path)


def test_a_revision_named_by_an_operator_is_logged_and_nothing_is_read(tmp_path, caplog):
    caplog.set_level("INFO", "mla")
    assert checkpoint_revision(str(tmp_path / "nowhere"), None, "v7") == "v7"
    assert "named 'v7' by the operator; their files are not read" in caplog.text


def test_a_directory_that_is_none_is_refused(tmp_path):
    with pytest.raises(Unsupported, match="neither a directory nor in the hub's cache"):
        checkpoint_directory(str(tmp_path / "nowhere"), None)


def test_a_further_file_counts_by_content(tmp_path):
    path = tmp_path / "scales.json"
    path.write_text("1")
    one = file_revision(str(path))
    path.write_text("2")
    assert file_revision(str(path)) != one
    assert file_revision(None) == ""
    with pytest.raises(Unsupported, match="cannot be read"):
        file_revision(str(tmp_path / "none"))


def test_made_up_weights_are_others_than_the_files():
    assert loading("auto", {}) == loading("safetensors", None) == ""
    assert loading("dummy", {}) != loading("auto", {"qlora_adapter_name_or_path": "x"}) != ""
