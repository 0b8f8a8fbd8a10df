"""``latentkv check``: verifies a data directory that no daemon serves."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn
from rich.table import Table

from kvstore.checking import Report
from kvstore.checking import check as check_directory
from kvstore.showing import shown
from server.commands.failures import NO, one_line
from server.commands.screen import add_row, progress, screen
from server.config import DOMAINS

_SHOWN = 20  # faults that are listed; the JSON has all


def check(
    directory: Annotated[Path, typer.Argument(help="Data directory of a store.", show_default=False)],
    repair: Annotated[bool, typer.Option("--repair", help="Drop what can't be proven right.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Verify a data directory that no daemon serves: every payload, chain and unit.

    Exit code 0: sound. 1: faults were found (and, with --repair, dropped). 2: it can't be checked.
    """
    with one_line():
        report = _run(directory, repair=repair)
    if as_json:
        typer.echo(json.dumps(_as_json(report), indent=2))
    else:
        _show(report, screen())
    for other in sorted((directory / DOMAINS).glob("*")):
        typer.echo(f"latentkv: {shown(str(other))} is the store of another domain; check it, too", err=True)
    raise typer.Exit(0 if report.sound else NO)


def _run(directory: Path, *, repair: bool) -> Report:
    columns = (TextColumn("verifying"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with progress(*columns) as bar:
        task = bar.add_task("verifying", total=None)

        def tell(done: int, total: int) -> None:
            bar.update(task, completed=done, total=total)

        return check_directory(directory, repair=repair, progress=tell)


def _as_json(report: Report) -> dict[str, object]:
    found = {"sound": report.sound, "counts": report.counts()}
    return found | asdict(report) | {"path": str(report.path)}


def _show(report: Report, console: Console) -> None:
    console.print(
        f"{shown(str(report.path))}: {report.blocks} blocks ({report.payload_bytes} bytes,"
        f" {report.payloads}),"
        f" {report.units} units, {report.namespaces} namespaces,"
        f" {report.unnamed} payloads that no record names",
        soft_wrap=True,
    )
    if report.cut_off:
        console.print(
            f"{report.cut_off} blocks are cut off, for one before them is missing: no fault, and storing it"
            " heals them",
            soft_wrap=True,
        )
    if report.sound:
        console.print("sound")
        return
    table = Table(title=", ".join(f"{count} {kind}" for kind, count in report.counts().items()))
    for head in ("fault", "of", "what is wrong"):
        table.add_column(head, overflow="fold")
    for fault in report.faults[:_SHOWN]:
        add_row(table, fault.kind.value, fault.subject, fault.detail)
    console.print(table)
    if len(report.faults) > _SHOWN:
        console.print(f"and {len(report.faults) - _SHOWN} more; --json lists them")
    if report.dropped_blocks or report.dropped_units:
        console.print(f"dropped {report.dropped_blocks} blocks and {report.dropped_units} units")
