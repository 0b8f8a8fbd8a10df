"""Who calls the daemon of a soak: its own workers, by uid and by a token, and a greedy tenant."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.soaking.greedy import TENANT
from benchmarks.soaking.requests import SPACES
from server.credentials import hash_of, new_token


@dataclass(frozen=True)
class Callers:
    """Three entries of a credentials file, in ``place``: by our uid, which maps the arena; by tokens."""

    place: Path
    honest: str = field(default_factory=new_token, repr=False)
    greedy: str = field(default_factory=new_token, repr=False)

    @property
    def file(self) -> Path:
        """What the daemon reads."""
        return self.place / "credentials.toml"

    @property
    def token_file(self) -> Path:
        """The token of the worker that gets bytes."""
        return self.place / "token"

    def write(self) -> None:
        """Make both files."""
        tenants = sorted({space.tenant for space in SPACES})
        entries = [
            _entry("mapped", f"uid = {os.getuid()}\nmap = true", tenants),
            _entry("bytes", f'token_sha256 = "{hash_of(self.honest)}"', tenants),
            _entry("greedy", f'token_sha256 = "{hash_of(self.greedy)}"', [TENANT]),
        ]
        for path, text in ((self.file, "\n".join(entries)), (self.token_file, self.honest)):
            path.touch(mode=0o600)
            path.write_text(text)


def _entry(name: str, proof: str, tenants: list[str]) -> str:
    return f'[[credential]]\nname = "{name}"\n{proof}\ntenants = {tenants}\n'
