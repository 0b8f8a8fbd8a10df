"""``latentkv token``: a bearer token, and what the credentials file keeps of it."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Annotated

import typer

from kvstore.errors import InvalidArgument
from kvstore.showing import require_showable
from server.commands.failures import WRONG, fail, one_line
from server.config import DOMAIN_NAME
from server.credentials import DEFAULT_DOMAIN, hash_of, new_token

NAME = re.compile(r"[\w.@-]{1,64}")  # as the credentials file has it


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
        for option, text in (("NAME", name), *(("--tenants", tenant) for tenant in covered)):
            require_showable(option, text)
        if not NAME.fullmatch(name):
            raise InvalidArgument(f"NAME={name!r}: write up to 64 letters, digits and _ . @ -")
        if not DOMAIN_NAME.fullmatch(domain):
            raise InvalidArgument(f"--domain {domain!r}: write up to 32 of a-z, 0-9 and -")
        descriptor = os.open(out, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w") as file:
            file.write(made + "\n")
    typer.echo(f'[[credential]]\nname = "{name}"\ntoken_sha256 = "{hash_of(made)}"')
    # A list of showable text is written in JSON as in TOML.
    listed = json.dumps(covered, ensure_ascii=False)
    typer.echo(f"tenants = {listed}" + ("\noperator = true" if operator else ""))
    if domain != DEFAULT_DOMAIN:
        typer.echo(f'domain = "{domain}"')
