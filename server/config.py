"""The daemon's configuration: flags over environment over a TOML file over defaults.

Parsed once, into one frozen ``Config``. Whatever is wrong becomes one ``ConfigError``
whose message is one line that names the setting, its value and where it came from.
"""

from __future__ import annotations

import json
import os
import re
import tomllib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import AfterValidator, BaseModel, BeforeValidator, ByteSize, ConfigDict, Field, ValidationError
from pydantic_settings import (
    BaseSettings,
    NoDecode,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    TomlConfigSettingsSource,
)

from kvstore.address import UNIX, Address
from kvstore.errors import InvalidArgument, KVStoreError
from kvstore.settings import Admit, CodecName, PayloadKind, Policy, StoreSettings
from kvstore.units import DEFAULT_INTERVAL
from server.credentials import DEFAULT_DOMAIN

ENV_PREFIX = "LATENTKV_"
SOCKET = "latentkv.sock"
DOMAINS = "domains"  # in the data directory: a directory for each domain but the first
DOMAIN_NAME = re.compile("[a-z0-9][a-z0-9-]{0,31}")


Found = TypeVar("Found", bound=BaseSettings)


class ConfigError(KVStoreError):
    """A setting is missing or wrong; the message is one line."""


def _check_http(http: str) -> str:
    if "/" in http or Address.parse(http).path:
        raise ValueError("write host:port")
    return http


def _check_place(listen: str) -> str:
    return str(Address.parse(listen))


def _check_listen(listen: str) -> str:
    address = Address.parse(listen)
    if not (address.local or address.tls):
        raise ValueError(
            "beyond loopback only TLS is spoken: write tls://host:port and set tls_cert, tls_key and"
            " credentials, or use 127.0.0.1"
        )
    return str(address)


def _check_path(given: object) -> object:
    """``~`` is somebody's home, and an empty text is no path: it would be the current directory."""
    if isinstance(given, Path):
        return given
    if not isinstance(given, str):
        raise ValueError("write a path, in quotes")
    if not given.strip():
        raise ValueError("it is empty: name a path (. is the current directory), or leave the setting away")
    if "\0" in given:
        raise ValueError("no path can hold a zero byte")
    home = os.path.expanduser(given)
    if home.startswith("~"):
        raise ValueError(
            "nobody's home directory is known by that name; write the whole path (./~ is a file)"
        )
    return home


FilePath = Annotated[Path, BeforeValidator(_check_path)]


class DomainSizes(BaseModel):
    """What a further trust domain has for itself, in bytes."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    host_bytes: ByteSize
    disk_bytes: ByteSize


def _check_domains(domains: dict[str, DomainSizes]) -> dict[str, DomainSizes]:
    for name in domains:
        if not DOMAIN_NAME.fullmatch(name):
            raise ValueError(f"{name!r} is no name of a domain; write up to 32 of a-z, 0-9 and -")
        if name == DEFAULT_DOMAIN:
            raise ValueError(f"there is {name!r} already, with host_bytes and disk_bytes; take another name")
    return domains


def default_listen(data: Path | None) -> str:
    """A socket under the user's runtime directory, or in the data directory if there is none.

    Raises ``ConfigError`` when neither is known.
    """
    runtime = Path(os.environ.get("XDG_RUNTIME_DIR") or f"/run/user/{os.getuid()}")
    if runtime.is_dir():
        return f"{UNIX}{runtime.absolute() / 'latentkv' / SOCKET}"
    if data is None:
        raise ConfigError(
            f"it is not known where the daemon listens: give --listen, {ENV_PREFIX}LISTEN or --data"
            f" (there is no runtime directory {runtime})"
        )
    return f"{UNIX}{data.absolute() / SOCKET}"


def _read_map(given: object) -> object:
    """A map from a flag or the environment is JSON; a file has it as a table."""
    if not isinstance(given, str):
        return given
    try:
        return json.loads(given)
    except ValueError:
        raise ValueError('write JSON, such as {"acme": "100GiB"}, or a table in the file') from None


class Place(BaseSettings):
    """Of the settings only what says where the daemon is."""

    model_config = SettingsConfigDict(frozen=True, extra="ignore", env_prefix=ENV_PREFIX)

    data: FilePath | None = None
    listen: Annotated[str, AfterValidator(_check_place)] | None = None


def _read_names(given: object) -> object:
    """Names from a flag or the environment stand between commas; a file has them as a list."""
    if not isinstance(given, str):
        return given
    return [name for part in given.split(",") if (name := part.strip())]


class Config(BaseSettings):
    """Every setting of the daemon. Sizes in bytes (``4GiB`` and the like are read), times in seconds."""

    model_config = SettingsConfigDict(frozen=True, extra="forbid", env_prefix=ENV_PREFIX)

    data: FilePath
    listen: Annotated[str, AfterValidator(_check_listen)] | None = None
    credentials: FilePath | None = None
    domains: Annotated[
        dict[str, DomainSizes], NoDecode, BeforeValidator(_read_map), AfterValidator(_check_domains)
    ] = {}
    tls_cert: FilePath | None = None
    tls_key: FilePath | None = None
    tls_client_ca: FilePath | None = None
    host_bytes: ByteSize = ByteSize(4 << 30)
    disk_bytes: ByteSize = ByteSize(50 << 30)
    interval: int = DEFAULT_INTERVAL
    policy: Policy = "unit"
    tenant_bytes: ByteSize = ByteSize(0)
    tenant_quotas: Annotated[dict[str, ByteSize], NoDecode, BeforeValidator(_read_map)] = {}
    tenant_namespaces: int = 4096
    tenant_block_sizes: int = 8
    admit: Admit = "always"
    codec: CodecName = "raw"
    payloads: PayloadKind = "lmdb"
    ghost_bytes: ByteSize = ByteSize(64 << 20)
    ttl_seconds: float = 86400.0
    max_age_seconds: float = 0.0
    pin_share: float = 0.5
    lease_seconds: float = 60.0
    drain_seconds: float = Field(default=30.0, gt=0)
    request_seconds: float = Field(default=10.0, gt=0, le=3600)
    readers: int = 8
    numa_node: int | None = None
    http: Annotated[str, AfterValidator(_check_http)] | None = None
    http_hosts: Annotated[tuple[str, ...], NoDecode, BeforeValidator(_read_names)] = ()
    record_bytes: ByteSize = ByteSize(16 << 20)
    prefill_rate: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    gpu_hour_price: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    log_level: Literal["debug", "info", "warning", "error"] = "info"

    @property
    def address(self) -> str:
        """Where to listen: ``unix:///path``, ``host:port`` or ``tls://host:port``."""
        return self.listen or default_listen(self.data)

    def store_settings(self, domain: str = DEFAULT_DOMAIN) -> StoreSettings:
        """A domain's store. Raises ``InvalidArgument``, whose message starts with the setting's name."""
        first = StoreSettings(**self.model_dump(include=set(StoreSettings.__dataclass_fields__)))
        if domain == DEFAULT_DOMAIN:
            return first
        sizes = self.domains[domain].model_dump()
        try:
            return replace(first, data=self.data / DOMAINS / domain, **sizes)
        except InvalidArgument as error:
            raise InvalidArgument(f"domains.{domain}.{error}") from None

    def stores(self) -> dict[str, StoreSettings]:
        """The settings of each domain's store, the first one's first. Raises as ``store_settings``."""
        return {domain: self.store_settings(domain) for domain in (DEFAULT_DOMAIN, *self.domains)}


def sources(flags: Mapping[str, str | None], file: str | None = None) -> dict[str, str]:
    """Where ``load`` finds each setting: ``from --data``, ``by default``. Raises ``ConfigError``."""
    origin = _origin(flags, file)
    return {name: origin.source(name) for name in Config.model_fields}


def load(flags: Mapping[str, str | None], file: str | None = None) -> Config:
    """Configuration from flags (None is not given), ``LATENTKV_*`` and a TOML file.

    The file is named by ``file`` or by ``LATENTKV_CONFIG``. Raises ``ConfigError``.
    """
    origin = _origin(flags, file)
    try:
        config = _sources(Path(origin.file) if origin.file else None, Config)(**origin.flags)
    except ValidationError as error:
        raise ConfigError(origin.describe(error)) from None
    try:
        config.stores()
        _check_reach(config)
    except (InvalidArgument, ValueError) as error:
        name = re.split(r"[=.]", str(error))[0]
        raise ConfigError(f"{error} ({origin.source(name)})") from None
    return config


def listening(listen: str | None, data: str | None) -> str:
    """Where the daemon is that a command asks: by the same rules as ``load``, and no other setting is needed.

    Raises ``ConfigError``.
    """
    origin = _origin({"listen": listen, "data": data})
    try:
        found = _sources(Path(origin.file) if origin.file else None, Place)(**origin.flags)
    except ValidationError as error:
        raise ConfigError(origin.describe(error)) from None
    return found.listen or default_listen(found.data)


def _origin(flags: Mapping[str, str | None], file: str | None = None) -> _Origin:
    named = os.environ.get(ENV_PREFIX + "CONFIG") if file is None else file
    given = {name: value for name, value in flags.items() if value is not None}
    if named is None:
        return _Origin(given, None, {})
    try:
        path = str(_check_path(named))
    except ValueError as error:
        source = "--config" if file is not None else ENV_PREFIX + "CONFIG"
        raise ConfigError(f"config={named!r} (from {source}): {error}") from None
    return _Origin(given, path, _read_table(Path(path)))


def _check_reach(config: Config) -> None:
    """Who can reach the daemon must be meant to: settings that only together make sense."""
    try:
        address = Address.parse(_check_listen(config.address))
    except ValueError as error:
        raise ValueError(f"listen={config.address!r}: {error}") from None
    files = {"tls_cert": config.tls_cert, "tls_key": config.tls_key, "tls_client_ca": config.tls_client_ca}
    if address.tls and not (config.tls_cert and config.tls_key):
        raise ValueError(f"listen={config.address!r} needs tls_cert and tls_key; set both")
    if not address.tls and (idle := next((name for name, file in files.items() if file), None)):
        raise ValueError(
            f"{idle}={str(files[idle])!r} is of no use without TLS; set listen to tls://host:port"
        )
    if not address.local and config.credentials is None:
        raise ValueError(
            f"listen={config.address!r} is beyond loopback and needs credentials; set that to a file of them"
        )
    if config.domains and config.credentials is None:
        raise ValueError(
            f"domains={', '.join(config.domains)} need credentials, which say who is of which; set that to a"
            " file of them"
        )
    if config.credentials and config.http and not Address.parse(config.http).local:
        raise ValueError(
            f"http={config.http!r} would show tenants' names and figures to whoever reaches it, in spite of"
            " credentials; use 127.0.0.1, and a proxy with a login in front"
        )


def _read_table(file: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(file.read_bytes().decode())
    except OSError as error:
        raise ConfigError(
            f"config={str(file)!r} cannot be read: {error.strerror}; name a TOML file"
        ) from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"config={str(file)!r} is no TOML: {error}") from None


def _sources(file: Path | None, settings: type[Found]) -> type[Found]:
    class Sources(settings):  # type: ignore[valid-type, misc]
        @classmethod
        def settings_customise_sources(
            cls,
            settings_cls: type[BaseSettings],
            init_settings: PydanticBaseSettingsSource,
            env_settings: PydanticBaseSettingsSource,
            dotenv_settings: PydanticBaseSettingsSource,
            file_secret_settings: PydanticBaseSettingsSource,
        ) -> tuple[PydanticBaseSettingsSource, ...]:
            if file is None:
                return init_settings, env_settings
            return init_settings, env_settings, TomlConfigSettingsSource(settings_cls, file)

    return Sources


class _Origin:
    """Says where a setting's value came from."""

    def __init__(self, flags: Mapping[str, Any], file: str | None, table: Mapping[str, Any]) -> None:
        self.flags = flags
        self.file = file
        self._table = table

    def source(self, name: str) -> str:
        """The flag, variable or file that gave the setting."""
        if name in self.flags:
            return f"from --{name.replace('_', '-')}"
        if ENV_PREFIX + name.upper() in os.environ:
            return f"from {ENV_PREFIX}{name.upper()}"
        return f"from {self.file}" if name in self._table else "by default"

    def describe(self, error: ValidationError) -> str:
        """One line about the first thing that is wrong."""
        first = error.errors()[0]
        name = ".".join(str(part) for part in first["loc"])
        source = self.source(str(first["loc"][0]))
        if first["type"] == "missing" and len(first["loc"]) > 1:
            return f"{name} is not set ({source}): a domain has memory and disk of its own; add it"
        if first["type"] == "missing":
            return f"{name} is not set: give --{name}, {ENV_PREFIX}{name.upper()}, or {name} in the TOML file"
        if first["type"] == "extra_forbidden":
            return f"{name}={first['input']!r} ({source}) is no setting; latentkv config show lists them"
        reason = first["msg"].removeprefix("Value error, ")
        return f"{name}={first['input']!r} ({source}): {reason}"
