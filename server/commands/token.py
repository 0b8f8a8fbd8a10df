"""``latentkv token``: a bearer token, and what the credentials file keeps of it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from server.commands.failures import WRONG, fail, one_line
from server.credentials import DEFAULT_DOMAIN, hash_of, new_token


def token(
    name: Annotated[str, typer.Argument(help="Name of the credential, for logs.", show_default=False)],
    out: Annotated[Path, typer.Option(help="Where the token goes; must not exist.", show_default=False)],
    tenants: Annotated[str, typer.Option(help="Tenants that it covers, such as search,chat; * is all.")] = "",
    operator: Annotated[bool, typer.Option("--operator", help="May use the operators' service.")] = False,
    domain: Annotated[str, typer.Option(help="The trust domain that it is of.")] = DEFAULT_DOMAIN,
) -> None:
    """Make a token: its file is for the caller, what is printed belongs into the credentials file."""
    covered = [tenant for tenant in tenants.split(",") if tenant]
    if not covered and not operator:
        fail("give --tenants, or --operator", WRONG)
    made = new_token()
    with one_line():
        descriptor = os.open(out, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w") as file:
            file.write(made + "\n")
    typer.echo(f'[[credential]]\nname = "{name}"\ntoken_sha256 = "{hash_of(made)}"')
    typer.echo(f"tenants = {covered}" + ("\noperator = true" if operator else ""))
    if domain != DEFAULT_DOMAIN:
        typer.echo(f'domain = "{domain}"')
