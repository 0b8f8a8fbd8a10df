"""Naming a checkpoint by its files: engines give a path or a hub's name, never the weights."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from huggingface_hub import try_to_load_from_cache
from huggingface_hub.errors import HFValidationError

from mla.errors import Unsupported
from mla.fingerprint import checkpoint_fingerprint

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


def checkpoint_revision(model: str, revision: str | None) -> str:
    """Fingerprint of a model's weight files. Raises ``Unsupported`` when there are none here."""
    return checkpoint_fingerprint(checkpoint_directory(model, revision))


def entries_digest(entries: Mapping[str, Any]) -> str:
    """blake2b-64 (hex) of a config: equal weights with, say, another rope make other latents."""
    kept = {
        name: value
        for name, value in entries.items()
        if not name.startswith("_") and name not in _IDLE_ENTRIES
    }
    return hashlib.blake2b(json.dumps(kept, sort_keys=True, default=str).encode(), digest_size=8).hexdigest()
