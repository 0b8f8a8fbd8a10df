"""``latentkv config``: what the settings come to."""

from __future__ import annotations

import json
from typing import Annotated

import typer
from rich.table import Table

from server.commands.failures import one_line
from server.commands.screen import add_row, screen
from server.commands.settings import Given, with_settings
from server.config import Config, sources

app = typer.Typer(help="The daemon's settings.", no_args_is_help=True)


@app.callback()
def _main() -> None:
    """The daemon's settings."""


@app.command("show")
@with_settings
def show(
    given: Given,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show what ``serve`` would run with, and where each value comes from."""
    with one_line():
        config, origins = given.load(), sources(given.flags, given.file)
        values = shown(config)
    if as_json:
        print(json.dumps({name: {"value": values[name], "source": origins[name]} for name in values}))
        return
    table = Table("setting", "value", "source", box=None)
    for name, value in values.items():
        add_row(table, name, "off" if value is None else str(value), origins[name])
    screen().print(table)


def shown(config: Config) -> dict[str, object]:
    """Every setting in its JSON form; ``listen`` is the address that is really taken."""
    return {**config.model_dump(mode="json"), "listen": config.address}
