"""``latentkv serve``."""

from __future__ import annotations

import asyncio

from server.commands.failures import one_line
from server.commands.settings import Given, with_settings
from server.config import Config
from server.lifecycle import Daemon, OpenStore, open_store
from server.logs import log_to_stderr
from server.signals import let_all_pass


@with_settings
def serve(given: Given) -> None:
    """Serve a data directory until SIGTERM.

    Each setting may also come from LATENTKV_<NAME> or from the TOML file; flags win over
    the environment, and that over the file.
    """
    with one_line():
        run_daemon(given.load())


def run_daemon(config: Config, open_store: OpenStore = open_store) -> None:
    """Log to standard error and serve until a signal. Raises ``KVStoreError`` when it cannot start."""
    log_to_stderr(config.log_level)

    async def run() -> None:
        await Daemon(config, open_store).run()

    try:
        asyncio.run(run())
    finally:
        let_all_pass()
