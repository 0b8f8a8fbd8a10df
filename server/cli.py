"""The ``latentkv`` command. Each noun has its module in ``server.commands``."""

from __future__ import annotations

import typer

from server.commands import bench, check, config, explain, plan, serve, status, token, units, warm

app = typer.Typer(
    help="A tiered store for the prefix caches of MLA models.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)


@app.callback()
def _main() -> None:
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
    """Entry point of the ``latentkv`` command."""
    app()
