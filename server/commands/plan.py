"""``latentkv plan``: what size to buy."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from pydantic import ByteSize, TypeAdapter, ValidationError
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from kvstore.errors import InvalidArgument
from kvstore.layout import PRESETS, preset
from kvstore.units import DEFAULT_INTERVAL, check_interval
from server.commands.daemon import AsJson
from server.commands.failures import one_line
from server.planning.sizing import Machine, Plan, capacities_of, plan
from server.planning.trace import Trace, read_trace

_REPLAYS = 3  # of each size

Model = Annotated[str, typer.Option(help=f"Layout of a block: {', '.join(PRESETS)}.")]
PrefillRate = Annotated[float, typer.Option(help="Tokens a second that the GPU prefills.", min=1e-3)]
DiskRate = Annotated[float, typer.Option(help="GB a second that the disk reads.", min=1e-3)]
Sizes = Annotated[str | None, typer.Option(help="Sizes such as 500GiB,2TiB. (1 to 100% of the trace)")]


def plan_sizes(
    trace: Annotated[Path, typer.Argument(help="JSON lines, plain or .zst; see docs/operations.md.")],
    model: Model = "deepseek-v3",
    prefill_rate: PrefillRate = 5000.0,
    disk_rate: DiskRate = 3.0,
    sizes: Sizes = None,
    interval: Annotated[
        int, typer.Option(help="Tokens between interval units; 0 is off.")
    ] = DEFAULT_INTERVAL,
    as_json: AsJson = False,
    png: Annotated[Path | None, typer.Option(help="Write a picture there.")] = None,
) -> None:
    """Say what each size of the cache would hit on a trace of requests, and the best that could be had."""
    with one_line():
        check_interval(interval)
        machine = Machine(preset(model).token_bytes, prefill_rate, disk_rate * 1e9)
        requests = read_trace(trace)
        made = _plan(requests, capacities_of(requests, _sizes(sizes), machine.token_bytes), machine, interval)
        if png is not None:
            _draw(made, png, f"{trace.name}, {model}")
    if as_json:
        print(json.dumps(asdict(made)))
    else:
        _print(made, model)


def _plan(requests: Trace, capacities: list[int], machine: Machine, interval: int) -> Plan:
    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("replaying", total=_REPLAYS * len(capacities))
        return plan(requests, capacities, machine, interval, lambda: bar.advance(task))


def _sizes(text: str | None) -> list[int]:
    adapter = TypeAdapter(ByteSize)
    try:
        return [adapter.validate_python(part.strip()) for part in text.split(",")] if text else []
    except ValidationError:
        raise InvalidArgument(
            f"--sizes {text!r}: write sizes with commas between, such as 500GiB,2TiB"
        ) from None


def _draw(made: Plan, path: Path, title: str) -> None:
    try:
        # Inside: matplotlib is an extra, and slow to load.
        from server.planning.picture import draw
    except ImportError:
        raise InvalidArgument("--png needs matplotlib: pip install 'latentkv[bench]'") from None
    draw(made, path, title)


def _print(made: Plan, model: str) -> None:
    console = Console()
    console.print(
        f"{made.requests:,} requests in {made.seconds / 3600:.2f} h, {made.distinct_blocks:,} distinct"
        f" blocks of {made.block_tokens} tokens, {model}"
    )
    table = Table(box=None)
    for name in ("size", "of all", "unit", "block", "best", "written/day", "prefill saved/day", "loads/day"):
        table.add_column(name, justify="right")
    for row in made.rows:
        table.add_row(
            f"{row.nbytes / 1e9:,.0f} GB",
            f"{row.share:.0%}",
            *(f"{100 * rate:.1f} %" for rate in (row.unit, row.block, row.optimum)),
            f"{row.written_bytes_a_day / 1e12:,.1f} TB",
            f"{row.prefill_seconds_a_day / 3600:,.1f} h",
            f"{row.load_seconds_a_day / 3600:,.1f} h",
        )
    console.print(table)
    console.print(
        "Read the row of your DISK for what hits, and that of your HOST for how much of it comes from memory."
    )
