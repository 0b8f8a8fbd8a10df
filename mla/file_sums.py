"""A name for a checkpoint's files by their content: engines give a directory, never the weights.

The hub's cache names a file by its content already, so a link to one there is not read. Any other file is
read once and what came of it remembered in a directory, by path, size and times. xxh3-128 reads
several GB a second, which no disk gives, where blake2b and sha256 would make a first start wait;
nobody who could forge it needs to, since who may write the checkpoint may write anything.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

import xxhash

from mla.errors import Unsupported

log = logging.getLogger(__name__)

WEIGHT_SUFFIXES = frozenset({".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf", ".npz"})
# Configs count too: of quantization, an adapter's rank and scaling, code that comes with the weights.
_OTHER_SUFFIXES = frozenset({".json", ".py", ".yaml", ".yml"})
# What says how text becomes tokens, or how they are chosen: not what the model computes of them.
_IDLE_FILES = re.compile(
    r"(tokenizer|special_tokens|added_tokens|vocab|merges|generation_config|chat_template"
    r"|preprocessor_config|processor_config|trainer_state|all_results|train_results|eval_results).*"
)
_BLOB = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")  # git's and sha256 names
_PIECE = 8 << 20
_THREADS = 4
_SETTLED = 2.0  # seconds since a file's last change, from which its times tell the next one
_REMEMBERED = 8192  # files


def checkpoint_fingerprint(directory: Path) -> str:
    """blake2b-128 (hex) over name and content of every file in a directory that makes the model what it is.

    Raises ``Unsupported`` when there is no weight file, or one cannot be read.
    """
    files = sorted(path for path in directory.iterdir() if _counts(path))
    if not any(path.suffix in WEIGHT_SUFFIXES for path in files):
        raise Unsupported(f"{directory} has no weight file to name the weights by: pass the revision by name")
    digest = hashlib.blake2b(digest_size=16, person=b"latentkv-files")
    with ThreadPoolExecutor(_THREADS, "latentkv-files") as pool:
        for path, content in zip(files, pool.map(file_content, files), strict=True):
            digest.update(f"{path.name} {content}\n".encode())
    return digest.hexdigest()


def _counts(path: Path) -> bool:
    if path.suffix not in WEIGHT_SUFFIXES | _OTHER_SUFFIXES or not path.is_file():
        return False
    return path.suffix in WEIGHT_SUFFIXES or not _IDLE_FILES.fullmatch(path.name)


def file_content(path: Path) -> str:
    """A name of a file's bytes. Raises ``Unsupported`` for one that cannot be read or is being written."""
    blob = _hub_blob(path)
    return blob if blob is not None else _remembered(path)


def _hub_blob(path: Path) -> str | None:
    """The hub's own name of a file's content: ``snapshots/REVISION/FILE`` links to ``blobs/NAME``."""
    if not path.is_symlink():
        return None
    target = path.resolve()
    blobs = target.parent
    inside = blobs.name == "blobs" and (blobs.parent / "snapshots") in path.absolute().parents
    return target.name if inside and _BLOB.fullmatch(target.name) else None


@dataclass(frozen=True, slots=True)
class _Times:
    """What tells a file from what it was, short of reading it."""

    path: str
    device: int
    inode: int
    size: int
    mtime_ns: int
    ctime_ns: int

    @classmethod
    def of(cls, path: Path) -> _Times:
        stat = path.stat()
        return cls(
            str(path.resolve()), stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns
        )


def cache_directory() -> Path:
    """Where contents are remembered: ``$XDG_CACHE_HOME/latentkv/files``, by default below ``~/.cache``."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(base) if os.path.isabs(base) else Path.home() / ".cache") / "latentkv" / "files"


def _remembered(path: Path) -> str:
    try:
        times = _Times.of(path)
        memory = _memory_of(times)
        if (known := _recall(memory, times)) is not None:
            return known
        content = _read(path)
        if _Times.of(path) != times:
            raise Unsupported(
                f"{path} changed while it was read to name the weights: start again once it is whole"
            )
    except OSError as error:
        raise Unsupported(f"{path} cannot be read to name the weights: {error.strerror or error}") from error
    if memory is not None and time.time() - max(times.mtime_ns, times.ctime_ns) / 1e9 > _SETTLED:
        _remember(memory, times, content)
    return content


def _read(path: Path) -> str:
    began = time.monotonic()
    digest = xxhash.xxh3_128()
    buffer = memoryview(bytearray(_PIECE))
    size = 0
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(buffer):
            digest.update(buffer[:count])
            size += count
    log.info("read %s (%d bytes, %.1f s) to name the weights", path, size, time.monotonic() - began)
    return digest.hexdigest()


def _memory_of(times: _Times) -> Path | None:
    try:
        directory = cache_directory()
    except RuntimeError:  # no home
        return None
    return directory / f"{hashlib.blake2b(times.path.encode(), digest_size=16).hexdigest()}.json"


def _recall(memory: Path | None, times: _Times) -> str | None:
    """None unless all is as it was; whatever else lies there is as good as nothing."""
    if memory is None:
        return None
    try:
        found = json.loads(memory.read_bytes())
        content = found.pop("xxh3_128")
        return content if found == asdict(times) and re.fullmatch("[0-9a-f]{32}", content) else None
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None


def _remember(memory: Path, times: _Times, content: str) -> None:
    """Whole or not at all; a file that cannot be written costs a reading at the next start."""
    try:
        memory.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        _forget_oldest(memory.parent)
        descriptor, name = tempfile.mkstemp(dir=memory.parent, suffix=".new")
        with os.fdopen(descriptor, "w") as file:
            json.dump(asdict(times) | {"xxh3_128": content}, file)
        os.replace(name, memory)
    except OSError as error:
        log.info("what %s contains is not remembered: %s", times.path, error)


def _forget_oldest(directory: Path) -> None:
    """Trainers leave a checkpoint a step."""
    files = list(directory.iterdir())
    if len(files) < _REMEMBERED:
        return
    for path in sorted(files, key=lambda one: one.stat().st_mtime)[: _REMEMBERED // 2]:
        path.unlink(missing_ok=True)
