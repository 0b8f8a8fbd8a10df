"""``latentkv status`` and ``latentkv top``."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Annotated, Any

import typer
from rich.console import Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from kvstore.showing import shown
from server.commands.daemon import AsJson, Data, Operator, Url, address
from server.commands.failures import one_line
from server.commands.screen import add_row, screen

Report = dict[str, Any]

_TOKENS = ("hit_tokens", "miss_tokens", "short_tokens")
STATES = {
    "ok": "ready",
    "host_only": "disk cannot be written",
    "degraded": "a background task is started again",
}


def status(listen: Url = None, data: Data = None, as_json: AsJson = False) -> None:
    """Say how the daemon is: tiers, hits by tenant, misses by reason, faults. Exit 3 if none answers."""
    with one_line(), Operator(address(listen, data)) as daemon:
        report = daemon.report()
        if as_json:
            print(json.dumps(report))
        else:
            screen().print(_shown(report, None))


def top(
    listen: Url = None,
    data: Data = None,
    as_json: AsJson = False,
    seconds: Annotated[float, typer.Option(help="Time between looks.", min=0.1)] = 2.0,
    looks: Annotated[int, typer.Option(help="How many looks; 0 is until Ctrl-C.", min=0)] = 0,
) -> None:
    """Watch the daemon live. With --json, a report a line."""
    with one_line():
        try:
            with Operator(address(listen, data)) as daemon:
                _show_live(daemon, as_json, seconds, looks)
        except KeyboardInterrupt:
            raise typer.Exit from None


def _show_live(daemon: Operator, as_json: bool, seconds: float, looks: int) -> None:
    if as_json:
        _watch(daemon, seconds, looks, lambda report, before: print(json.dumps(report), flush=True))
    else:
        with Live(console=screen(), auto_refresh=False) as live:
            _watch(daemon, seconds, looks, lambda *r: live.update(_shown(*r), refresh=True))


def _watch(
    daemon: Operator, seconds: float, looks: int, show: Callable[[Report, Report | None], None]
) -> None:
    before, count = None, 0
    while True:
        report = daemon.report()
        show(report, before)
        before, count = report, count + 1
        if count == looks:
            return
        time.sleep(seconds)


def _shown(report: Report, before: Report | None) -> Group:
    parts: list[RenderableType] = [_headline(report), _tiers(report), _work(report, before)]
    parts += [table for table in (_tenants(report, before), _misses(report), _faults(report)) if table]
    return Group(*parts)


def _headline(report: Report) -> Text:
    state = STATES.get(report["mode"], str(report["mode"]))  # a newer daemon may have others
    style = "green" if state == "ready" else "bold red"
    text = Text(f"latentkv {report['release']} at {shown(report['address'])}: ")
    text.append(state, style)
    if len(report["domains"]) > 1:
        text.append(f", domain {report['domain']} of {', '.join(report['domains'])}")
    return text.append(f", up {duration(report['at'] - report['started'])}, data {shown(report['data'])}\n")


def _tiers(report: Report) -> Table:
    table = Table("tier", "", "used", "of", "blocks", box=None)
    for tier in report["tiers"]:
        used, capacity = tier["used_bytes"], tier["capacity_bytes"]
        bar = ProgressBar(total=capacity, completed=used, width=30)
        add_row(table, tier["tier"].upper(), bar, size(used), size(capacity), f"{tier['blocks']:,}")
    return table


def _work(report: Report, before: Report | None) -> Text:
    text = (
        f"{report['units']:,} units, {report['leases']:,} leases, {report['dirty_blocks']:,} unwritten blocks"
    )
    if before is not None and report["at"] > before["at"]:
        loaded, written = (
            (report["totals"][name] - before["totals"][name]) / (report["at"] - before["at"])
            for name in ("loaded_bytes", "written_bytes")
        )
        text += f"; loads {size(loaded)}/s, writes {size(written)}/s"
    return Text(f"{text}\n")


def _tenants(report: Report, before: Report | None) -> Table | None:
    """By tenant since the daemon's start; for ``top`` the hit rate since the last look beside it.

    Delivered are the tokens that loads brought, of those that Match found.
    """
    if not report["tenants"]:
        return None
    then = {each["tenant"]: each for each in before["tenants"]} if before else {}
    table = Table("tenant", "matches", "hit rate", "now", "delivered", "break-even", "saved", box=None)
    for each in report["tenants"]:
        past = then.get(each["tenant"], dict.fromkeys(_TOKENS, 0))
        hit, miss, short = (each[name] - past[name] for name in _TOKENS)
        add_row(
            table,
            each["tenant"],
            f"{each['matches']:,}",
            rate(each["hit_tokens"], each["miss_tokens"] + each["short_tokens"]),
            rate(hit, miss + short) if before else "",
            f"{each['hit_tokens']:,} of {each['matched_tokens']:,}",
            f"{each['break_even_rate']:,.0f} tokens/s" if each["break_even_rate"] else "",
            _saved(each),
        )
    return table


def _saved(tenant: Report) -> str:
    """Prefill time, and money where the GPU has a price; nothing where the rate is unknown."""
    if not tenant["saved_seconds"]:
        return ""
    money = f", {tenant['saved_money']:,.2f}" if tenant["saved_money"] else ""
    return duration(tenant["saved_seconds"]) + money


def _misses(report: Report) -> Table | None:
    short = [each for each in report["misses"] if each["reason"] != "none"]
    if not short:
        return None
    table = Table("miss reason", "matches", "tokens", box=None)
    for each in short:
        add_row(table, each["reason"], f"{each['matches']:,}", f"{each['tokens']:,}")
    return table


def _faults(report: Report) -> Table | None:
    if not report["faults"]:
        return None
    table = Table("fault", "when", "details", box=None)
    for each in report["faults"][:5]:
        add_row(table, each["event"], moment(each["at"]), each["details"])
    return table


def rate(hit: int, miss: int) -> str:
    """Share of the tokens that hit."""
    return f"{hit / (hit + miss):.1%}" if hit + miss else "-"


def size(nbytes: float) -> str:
    """Bytes for people."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if nbytes < 1024:
            return f"{nbytes:.0f} {unit}" if unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= 1024
    return f"{nbytes:.1f} TiB"


def duration(seconds: float) -> str:
    """Seconds for people."""
    for name, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.1f} {name}"
    return f"{seconds:.0f} s"


def moment(at: float) -> str:
    """Unix seconds for people, in local time."""
    return time.strftime("%F %T", time.localtime(at))
