"""``latentkv units``: what a daemon holds, keeping it, and deleting it."""

from __future__ import annotations

import json
import re
import time
from enum import StrEnum
from typing import Annotated, Any

import typer
from rich.table import Table

from kvstore.errors import InvalidArgument
from kvstore.showing import shown
from server.commands.daemon import AsJson, Data, Operator, Url, address
from server.commands.failures import NO, one_line
from server.commands.screen import add_row, screen
from server.commands.status import duration, moment, size

app = typer.Typer(help="The units that a daemon holds.", no_args_is_help=True)


class Order(StrEnum):
    """As ``kvstore.curation.UnitOrder``."""

    USED = "used"
    CREATED = "created"
    TOKENS = "tokens"
    HITS = "hits"


Unit = Annotated[
    str, typer.Argument(help="Name of the unit, or enough of its beginning.", show_default=False)
]
MaybeUnit = Annotated[
    str | None, typer.Argument(help="Name of the unit, or enough of its beginning.", show_default=False)
]
Handle = Annotated[str, typer.Argument(help="Handle of the pin.", show_default=False)]
Tenant = Annotated[str | None, typer.Option(help="Of this tenant only.", show_default=False)]
For = Annotated[
    str, typer.Option("--for", help="Time from now, such as 30min, 12h or 7d.", show_default=False)
]

_SPAN = re.compile(r"(\d+(?:\.\d+)?)(s|min|h|d)")
_SECONDS = {"s": 1, "min": 60, "h": 3600, "d": 86400}
_NAME = 12  # characters of a unit's name in a table


@app.callback()
def _main() -> None:
    """The units that a daemon holds."""


@app.command("list")
def list_units(
    tenant: Tenant = None,
    order: Annotated[Order, typer.Option(help="The largest or latest first.")] = Order.USED,
    limit: Annotated[int, typer.Option(help="How many.", min=1, max=1000)] = 50,
    pins: Annotated[bool, typer.Option("--pins", help="List the pins instead.")] = False,
    listen: Url = None,
    data: Data = None,
    as_json: AsJson = False,
) -> None:
    """List units, or pins."""
    with one_line(), Operator(address(listen, data)) as daemon:
        found = daemon.pins(tenant) if pins else daemon.units(tenant, order.value, limit)
        if as_json:
            print(json.dumps(found))
        else:
            screen().print(_pins(found) if pins else _units(found))


@app.command("show")
def show_unit(unit: Unit, listen: Url = None, data: Data = None, as_json: AsJson = False) -> None:
    """Show a unit: whose it is, how large, how often it was hit, and its pins."""
    with one_line(), Operator(address(listen, data)) as daemon:
        found = daemon.unit(unit)
        if as_json:
            print(json.dumps(found))
            return
        shown = found | {
            "kinds": ", ".join(found["kinds"]),
            "nbytes": size(found["nbytes"]),
            "created": f"{moment(found['created'])} ({_ago(found['created'])})",
            "used": f"{moment(found['used'])} ({_ago(found['used'])})",
            "pins": ", ".join(f"{pin['handle']} until {moment(pin['expires'])}" for pin in found["pins"]),
        }
        table = Table("", "", box=None, show_header=False)
        for name, value in shown.items():
            add_row(table, name, str(value))
        screen(soft_wrap=True).print(table)


@app.command("pin")
def pin_unit(
    span: For,
    unit: MaybeUnit = None,
    handle: Annotated[str, typer.Option(help="Extend this pin instead.", show_default=False)] = "",
    listen: Url = None,
    data: Data = None,
    as_json: AsJson = False,
) -> None:
    """Keep a unit from eviction and expiry for a time; prints the handle that ends or extends that."""
    with one_line():
        seconds = span_seconds(span)
        with Operator(address(listen, data)) as daemon:
            pin = daemon.pin(seconds, unit=unit or "", handle=handle)
        if as_json:
            print(json.dumps(pin))
        else:
            print(f"{shown(pin['handle'])} keeps unit {pin['unit'][:_NAME]} until {moment(pin['expires'])}")


@app.command("unpin")
def unpin_unit(handle: Handle, listen: Url = None, data: Data = None, as_json: AsJson = False) -> None:
    """End a pin."""
    with one_line(), Operator(address(listen, data)) as daemon:
        daemon.unpin(handle)
    print(json.dumps({"handle": handle}) if as_json else f"{shown(handle)} is dropped")


@app.command("delete")
def delete_units(
    unit: MaybeUnit = None,
    namespace: Annotated[
        str | None, typer.Option(help="Digest of a whole namespace, or its beginning.", show_default=False)
    ] = None,
    tenant: Annotated[str | None, typer.Option(help="All of this tenant.", show_default=False)] = None,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    listen: Url = None,
    data: Data = None,
    as_json: AsJson = False,
) -> None:
    """Delete a unit, a namespace or a tenant, from every tier and for good.

    Of a unit those blocks go that nothing else needs. Exit code 1 if you said no.
    """
    named = {"unit": unit, "namespace": namespace, "tenant": tenant}
    what = {name: value for name, value in named.items() if value is not None}
    with one_line():
        if len(what) != 1:
            raise InvalidArgument("name one of a unit, --namespace and --tenant")
        (name, value), *_ = what.items()
        if (
            name != "unit"
            and not yes
            and not typer.confirm(f"Delete all of {name} {shown(value)!r}?", err=True)
        ):
            raise typer.Exit(NO)
        with Operator(address(listen, data)) as daemon:
            deleted = daemon.delete(name, value)
    print(json.dumps(deleted) if as_json else f"{deleted['blocks']:,} blocks are deleted")


def span_seconds(text: str, option: str = "--for") -> float:
    """Seconds of a time such as ``12h``. Raises ``InvalidArgument`` naming the option."""
    found = _SPAN.fullmatch(text)
    if found is None:
        raise InvalidArgument(f"{option} {text!r}: write a time such as 90s, 30min, 12h or 7d")
    return float(found[1]) * _SECONDS[found[2]]


def _units(found: list[dict[str, Any]]) -> Table:
    table = Table(box=None)
    table.add_column("unit", no_wrap=True, min_width=_NAME)
    for name in ("tenant", "model", "kinds", "tokens", "size", "hits", "used", "pinned until"):
        table.add_column(name, overflow="fold")
    for each in found:
        until = max((pin["expires"] for pin in each["pins"]), default=None)
        add_row(
            table,
            each["unit"][:_NAME],
            each["tenant"],
            each["model"],
            ", ".join(each["kinds"]),
            f"{each['tokens']:,}",
            size(each["nbytes"]),
            f"{each['hits']:,}",
            _ago(each["used"]),
            moment(until) if until else "",
        )
    return table


def _pins(found: list[dict[str, Any]]) -> Table:
    table = Table("handle", "unit", "made", "until", box=None)
    for each in found:
        add_row(table, each["handle"], each["unit"][:_NAME], moment(each["created"]), moment(each["expires"]))
    return table


def _ago(seconds: float) -> str:
    return f"{duration(max(time.time() - seconds, 0))} ago"
