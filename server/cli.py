"""The ``latentkv`` command. Each noun has its module in ``server.commands``."""

from __future__ import annotations

from typing import Annotated

import typer

from server.commands import bench, check, config, explain, plan, serve, status, token, units, warm
from server.metrics import release
from server.standard import telling_of_lost_output

app = typer.Typer(
    help="A tiered store for the prefix caches of MLA models.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)


def _say_version(asked: bool) -> None:
    if asked:
        typer.echo(f"latentkv {release()}")
        raise typer.Exit


@app.callback()
def _main(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", is_eager=True, callback=_say_version)
    ] = False,
) -> None:
    """A tiered store for the prefix caches of MLA models."""


app.command()(serve.serve)
app.command()(check.check)
app.command()(bench.bench)
app.command()(status.status)
app.command()(status.top)
app.command("explain")(explain.explain_prompt)
app.command()(token.token)
app.command("plan")(plan.plan_sizes)
app.command()(warm.warm)
app.add_typer(units.app, name="units")
app.add_typer(config.app, name="config")


def main() -> None:
    """Run the command that the arguments name."""
    with telling_of_lost_output():
        app()
