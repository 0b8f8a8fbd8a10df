"""Who may do what: callers, what proves them, and the file that an operator keeps of both.

A caller is who a call comes from: it has a set of tenants, all of one trust domain. What proves
it is a bearer token, a verified client certificate, or, on this host, the uid of its process.
"""

from __future__ import annotations

import hashlib
import os
import re
import secrets
import tomllib
from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from kvstore.errors import KVStoreError
from server.trusted_files import UntrustedFile, read_trusted

ALL = "*"  # in the file: every tenant that is of no other domain
DEFAULT_DOMAIN = "default"  # of who names none
_TENANT = "tenant"
_TOKEN_PREFIX = "latentkv_"
_TOKEN = re.compile(_TOKEN_PREFIX + r"[A-Za-z0-9_-]{43}")  # 32 random bytes, so that a plain hash keeps them


Subject = tuple[str, str | int]  # a kind, tenant or of a proof, and its value


class CredentialsError(KVStoreError):
    """The credentials file cannot be used; the message is one line."""


@dataclass(frozen=True, slots=True)
class Caller:
    """Who calls, and what that allows. Equal callers are one: what one holds is the other's too."""

    name: str
    tenants: frozenset[str] | None  # None is all but the foreign ones
    operator: bool = False  # may use the operators' service, which shows every tenant of the domain
    maps: bool = False  # may map the domain's arena, and so see its tenants' blocks there
    domain: str = DEFAULT_DOMAIN
    foreign: frozenset[str] = frozenset()  # tenants of other domains

    def covers(self, tenant: str) -> bool:
        """Whether it may have to do with this tenant's blocks."""
        return tenant not in self.foreign if self.tenants is None else tenant in self.tenants


EVERYONE = Caller("everyone", None, operator=True, maps=True)


@dataclass(frozen=True, slots=True)
class Evidence:
    """What came with a call, at most one of the three."""

    token: str | None = field(default=None, repr=False)
    names: tuple[str, ...] = ()  # the alternative names of a client certificate that was verified
    uid: int | None = None  # of the process, as the kernel says


class Credentials(Protocol):
    """Tells who calls."""

    def caller(self, evidence: Evidence) -> Caller | None:
        """Whom the evidence proves; None if nobody."""


class Unguarded:
    """No credentials file: everyone who can reach the daemon may do everything.

    Only our own processes and root's may map the arena, as they could read our files.
    """

    def caller(self, evidence: Evidence) -> Caller | None:
        """See ``Credentials``."""
        return EVERYONE if evidence.uid in (None, 0, os.getuid()) else None


class CredentialFile:
    """The callers of a TOML file, which names each with one proof and its tenants."""

    def __init__(self, path: Path, domains: Collection[str] = (DEFAULT_DOMAIN,)) -> None:
        """``domains`` are those that the daemon has. Raises ``CredentialsError``."""
        self._path = path
        self._borders = Borders(domains)
        self.reload()

    def reload(self) -> None:
        """Read the file again. Raises ``CredentialsError``; then what was known stays in force."""
        listed = _read(self._path).credential
        try:
            self._borders.settle(listed)
        except ValueError as error:
            raise CredentialsError(f"{self._path}: {error}") from None
        self._by_proof = {each.proof: each.caller(self._borders) for each in listed}

    def __len__(self) -> int:
        return len(self._by_proof)

    def caller(self, evidence: Evidence) -> Caller | None:
        """See ``Credentials``."""
        if evidence.token is not None:
            return self._by_proof.get(("token", hash_of(evidence.token)))
        if evidence.uid is not None:
            return self._by_proof.get(("uid", evidence.uid))
        found = (self._by_proof.get(("certificate", name)) for name in evidence.names)
        return next((caller for caller in found if caller), None)


class Borders:
    """Which domain each tenant and each proof is of: one, for as long as the daemon runs.

    What moved would leave blocks in the memory of the domain that it came from, or go on to map that.
    """

    def __init__(self, domains: Collection[str]) -> None:
        self._domains = domains
        self._of: dict[Subject, str] = {}

    def settle(self, listed: Iterable[_Entry]) -> None:
        """Draw them by a file's entries, too. Raises ``ValueError``; then nothing has changed."""
        of, rest = dict(self._of), self._of.get((_TENANT, ALL))
        for each in listed:
            if each.domain not in self._domains:
                raise ValueError(
                    f"credential {each.name!r} is of the domain {each.domain!r}, and the daemon has"
                    f" {', '.join(self._domains)}; name one of these, or give it memory and disk in the"
                    " setting domains"
                )
            for subject in (each.proof, *((_TENANT, tenant) for tenant in each.tenants)):
                known = of.get(subject) or (rest if subject[0] == _TENANT else None) or each.domain
                if known != each.domain:
                    kind, name = subject
                    raise ValueError(
                        f"credential {each.name!r} is of the domain {each.domain!r}, and its {kind}"
                        f" {name!r} of {known!r}; name one domain for it (restart the daemon if it has moved)"
                    )
                of[subject] = known
        self._of = of

    def foreign(self, domain: str) -> frozenset[str]:
        """Tenants of other domains."""
        return frozenset(
            str(name) for (kind, name), of in self._of.items() if kind == _TENANT and of != domain
        )


class _Entry(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str = Field(min_length=1, max_length=64, pattern=r"^[\w.@-]+$")  # for logs
    tenants: tuple[str, ...] = ()
    domain: str = DEFAULT_DOMAIN
    operator: bool = False
    map: bool = False
    token_sha256: str | None = Field(default=None, pattern="^[0-9a-f]{64}$")
    certificate: str | None = None
    uid: int | None = Field(default=None, ge=0)

    @model_validator(mode="after")
    def _check(self) -> Self:
        if sum(proof is not None for proof in (self.token_sha256, self.certificate, self.uid)) != 1:
            raise ValueError("give exactly one of token_sha256, certificate and uid")
        if self.map and self.uid is None:
            raise ValueError("map needs a uid: only processes of this host can map the arena")
        if not self.tenants and not self.operator:
            raise ValueError('give it tenants, such as ["search"] or ["*"], or operator = true')
        return self

    @property
    def proof(self) -> Subject:
        if self.token_sha256 is not None:
            return "token", self.token_sha256
        return ("uid", self.uid) if self.uid is not None else ("certificate", self.certificate or "")

    def caller(self, borders: Borders) -> Caller:
        every = ALL in self.tenants
        tenants = None if every else frozenset(self.tenants)
        foreign = borders.foreign(self.domain) if every else frozenset()
        return Caller(self.name, tenants, self.operator, self.map, self.domain, foreign)


class _File(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    credential: tuple[_Entry, ...]

    @model_validator(mode="after")
    def _check(self) -> Self:
        said: list[Subject] = []
        for each in self.credential:
            said += [("name", each.name), each.proof]
        for (what, value), count in Counter(said).items():
            if count > 1:
                raise ValueError(f"two credentials have the {what} {value!r}; give each its own")
        return self


def _read(path: Path) -> _File:
    try:
        return _File.model_validate(tomllib.loads(read_trusted(path).data.decode()))
    except UntrustedFile as error:
        raise CredentialsError(str(error)) from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise CredentialsError(f"{path} is no TOML: {error}") from None
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"]) or "credential"
        raise CredentialsError(f"{path}: {where}: {first['msg'].removeprefix('Value error, ')}") from None


def new_token() -> str:
    """A bearer token that nobody can guess."""
    return _TOKEN_PREFIX + secrets.token_urlsafe(32)


def hash_of(token: str) -> str:
    """What a credentials file keeps of a token. What has not the form of one gets a hash that none has."""
    return hashlib.sha256(token.encode()).hexdigest() if _TOKEN.fullmatch(token) else ""
