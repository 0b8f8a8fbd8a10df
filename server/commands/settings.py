"""The daemon's settings as options of a command."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any

import typer

from server import config as configuration
from server.config import Config

# In the order of the help page. Defaults in round brackets: square ones would be taken for markup.
HELP = {
    "data": "Directory of the store; made if it does not exist.",
    "listen": "unix:///path, host:port on loopback, or tls://host:port. (a private socket)",
    "credentials": "TOML file of who may use which tenants. (whoever reaches it, all)",
    "domains": 'Further trust domains, as JSON: {"b": {"host_bytes": "4GiB", "disk_bytes": "9GiB"}}. (none)',
    "tls_cert": "Certificate of a tls:// address, PEM.",
    "tls_key": "Its key, PEM.",
    "tls_client_ca": "Authority that every client must have a certificate of, PEM. (none)",
    "http": "host:port for metrics, health and the status page. (off)",
    "host_bytes": "Shared memory for blocks, such as 4GiB. (4GiB)",
    "disk_bytes": "Disk for blocks and catalogue, such as 50GiB. (50GiB)",
    "interval": "Tokens between interval units; 0 is off. (2048)",
    "policy": "What can be hit: unit or block. (unit)",
    "tenant_bytes": "Disk that one tenant may fill; 0 is all. (0)",
    "tenant_quotas": 'The same by tenant, as JSON: {"acme": "100GiB"}. (none)',
    "tenant_namespaces": "Namespaces that a tenant, or a caller, may have in use. (4096)",
    "tenant_block_sizes": "And of how many sizes of blocks. (8)",
    "admit": "What goes to disk: always, or second: what was seen before. (always)",
    "codec": "How blocks are written: raw or zstd. (raw)",
    "payloads": "Where blocks lie: lmdb, or slab for heavy writing. (lmdb)",
    "ghost_bytes": "RAM for chains seen and not stored. (64MiB)",
    "ttl_seconds": "Life of a block since its last use; 0 is for ever. (86400)",
    "max_age_seconds": "Life of a block since it was stored; 0 is for ever. (0)",
    "pin_share": "Share of the disk that pins may keep, 0 to 0.8. (0.5)",
    "lease_seconds": "Life of an unused lease. (60)",
    "request_seconds": "Time for a peer to send a request, or to read the answer of a page. (10)",
    "drain_seconds": "Deadline for what is unwritten at the end. (30)",
    "readers": "Threads that read blocks. (8)",
    "numa_node": "NUMA node of the shared memory, that of the workers' GPUs. (any)",
    "http_hosts": "Names the HTTP port may be asked by, beside its own: a, b. (none)",
    "record_bytes": "RAM for a record of the last requests, for plan; 0 is none. (16MiB)",
    "prefill_rate": "Tokens a second that the model prefills, to say what is saved. (unknown)",
    "gpu_hour_price": "Price of an hour of the GPU, in your money. (unknown)",
    "log_level": "debug, info, warning or error. (info)",
}


@dataclass(frozen=True, slots=True)
class Given:
    """What the command line said of settings: flags (None is not given), and the file."""

    flags: Mapping[str, str | None]
    file: str | None

    def load(self) -> Config:
        """The whole configuration. Raises ``ConfigError``."""
        return configuration.load(self.flags, self.file)


def with_settings(command: Callable[..., None]) -> Callable[..., None]:
    """Give ``command(given, ...)`` an option for each setting, and ``--config`` for the file."""

    def run(*, config: str | None, **rest: Any) -> None:
        flags = {name: rest.pop(name) for name in HELP}
        command(Given(flags, config), **rest)

    own = list(inspect.signature(command, eval_str=True).parameters.values())[1:]
    options = [_option(name, text) for name, text in HELP.items()]
    file = _option("config", "TOML file with these settings; also LATENTKV_CONFIG.")
    parameters = [*options, file, *(each.replace(kind=inspect.Parameter.KEYWORD_ONLY) for each in own)]
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__doc__ = command.__doc__
    run.__name__ = command.__name__
    return run


def _option(name: str, text: str) -> inspect.Parameter:
    return inspect.Parameter(
        name,
        inspect.Parameter.KEYWORD_ONLY,
        default=None,
        annotation=Annotated[str | None, typer.Option(help=text, show_default=False)],
    )
