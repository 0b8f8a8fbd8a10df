"""Naming a checkpoint by its files: engines give a path or a hub's name, never the weights."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from huggingface_hub import try_to_load_from_cache
from huggingface_hub.errors import HFValidationError

from mla.errors import Unsupported
from mla.file_sums import checkpoint_fingerprint, file_content

log = logging.getLogger(__name__)

# Entries of a config that say nothing about the computation.
_IDLE_ENTRIES = {"transformers_version", "architectures", "use_cache", "id2label", "label2id"}


def checkpoint_directory(model: str, revision: str | None) -> Path:
    """Where a model's files lie on this host. Raises ``Unsupported`` when they don't."""
    directory = Path(model)
    if directory.is_dir():
        return directory
    try:
        config = try_to_load_from_cache(model, "config.json", revision=revision)
    except HFValidationError:  # a path, but of nothing
        config = None
    if not isinstance(config, str):
        raise Unsupported(
            f"{model} is neither a directory nor in the hub's cache: give the server a local directory"
        )
    return Path(config).parent


def checkpoint_revision(model: str, revision: str | None, named: str = "") -> str:
    """Fingerprint of a model's files, or what an operator has ``named`` them; then they are not read.

    Raises ``Unsupported`` when there are none here.
    """
    if named:
        log.info("the weights of %s are named %r by the operator; their files are not read", model, named)
        return named
    return checkpoint_fingerprint(checkpoint_directory(model, revision))


def loading(load_format: object, extra: object) -> str:
    """How an engine gets weights, where that makes others of the same files.

    With "dummy" it makes them up; a loader's extra config may name further files.
    """
    return f"{'dummy' if str(load_format) == 'dummy' else ''} {extra or ''}".strip()


def file_revision(path: str | None) -> str:
    """Content of a further file that an engine is given by path; "" for none. Raises ``Unsupported``."""
    return file_content(Path(path)) if path else ""


def entries_digest(entries: Mapping[str, Any]) -> str:
    """blake2b-64 (hex) of a config: equal weights with, say, another rope make other latents."""
    kept = {
        name: value
        for name, value in entries.items()
        if not name.startswith("_") and name not in _IDLE_ENTRIES
    }
    return hashlib.blake2b(json.dumps(kept, sort_keys=True, default=str).encode(), digest_size=8).hexdigest()
