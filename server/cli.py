"""The ``latentkv`` command."""

from __future__ import annotations

import asyncio
import logging
import sys
from typing import Annotated, Any

import typer

from kvstore.errors import KVStoreError
from server import config as configuration
from server.check import check
from server.lifecycle import Daemon

app = typer.Typer(
    help="A tiered store for the prefix caches of MLA models.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def _flag(text: str) -> Any:
    return typer.Option(help=text, show_default=False)


@app.callback()
def _main() -> None:
    """A tiered store for the prefix caches of MLA models."""


@app.command()
def serve(
    data: Annotated[str | None, _flag("Directory of the store; made if it does not exist.")] = None,
    listen: Annotated[str | None, _flag("unix:///path, or host:port on loopback. [a private socket]")] = None,
    host_bytes: Annotated[str | None, _flag("Shared memory for blocks, such as 4GiB. [4GiB]")] = None,
    disk_bytes: Annotated[str | None, _flag("Disk for blocks and catalogue, such as 50GiB. [50GiB]")] = None,
    interval: Annotated[str | None, _flag("Tokens between interval units; 0 is off. [2048]")] = None,
    policy: Annotated[str | None, _flag("What can be hit: unit or block. [unit]")] = None,
    codec: Annotated[str | None, _flag("How blocks are written: raw or zstd. [raw]")] = None,
    payloads: Annotated[
        str | None, _flag("Where blocks lie: lmdb, or slab for heavy writing. [lmdb]")
    ] = None,
    ghost_bytes: Annotated[str | None, _flag("RAM for chains seen and not stored. [64MiB]")] = None,
    lease_seconds: Annotated[str | None, _flag("Life of an unused lease. [60]")] = None,
    drain_seconds: Annotated[str | None, _flag("Deadline for what is unwritten at the end. [30]")] = None,
    readers: Annotated[str | None, _flag("Threads that read blocks. [8]")] = None,
    log_level: Annotated[str | None, _flag("debug, info, warning or error. [info]")] = None,
    config: Annotated[str | None, _flag("TOML file with these settings; also LATENTKV_CONFIG.")] = None,
) -> None:
    """Serve a data directory until SIGTERM.

    Each setting may also come from LATENTKV_<NAME> or from the TOML file; flags win over
    the environment, and that over the file.
    """
    flags = {
        "data": data,
        "listen": listen,
        "host_bytes": host_bytes,
        "disk_bytes": disk_bytes,
        "interval": interval,
        "policy": policy,
        "codec": codec,
        "payloads": payloads,
        "ghost_bytes": ghost_bytes,
        "lease_seconds": lease_seconds,
        "drain_seconds": drain_seconds,
        "readers": readers,
        "log_level": log_level,
    }
    try:
        _serve(configuration.load(flags, config))
    except KVStoreError as error:
        typer.echo(f"latentkv: {error}", err=True)
        raise typer.Exit(2) from None
    except OSError as error:
        where = f": {error.filename}" if error.filename else ""
        typer.echo(f"latentkv: {error.strerror or error}{where}", err=True)
        raise typer.Exit(2) from None


def _serve(config: configuration.Config) -> None:
    logging.basicConfig(
        stream=sys.stderr,
        level=config.log_level.upper(),
        format="%(asctime)s level=%(levelname)s logger=%(name)s %(message)s",
    )

    async def run() -> None:
        await Daemon(config).run()

    asyncio.run(run())


app.command()(check)


def main() -> None:
    """Entry point of the ``latentkv`` command."""
    app()
