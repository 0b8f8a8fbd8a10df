"""``latentkv plan``: what size to buy."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import typer
from pydantic import ByteSize, TypeAdapter, ValidationError
from rich.progress import Progress
from rich.table import Table

from kvstore.errors import InvalidArgument
from kvstore.layout import PRESETS, preset
from kvstore.showing import shown
from kvstore.units import DEFAULT_INTERVAL, check_interval
from server.commands.daemon import AsJson, Data, Operator, Url, address
from server.commands.failures import one_line
from server.commands.screen import progress, screen
from server.planning.sizing import Machine, Plan, capacities_of, plan
from server.planning.trace import Trace, read_trace, write_trace

_REPLAYS = 3  # of each size

DEFAULT_MODEL = "deepseek-v3"

Model = Annotated[
    str | None,
    typer.Option(
        help=f"Layout of a block: {', '.join(PRESETS)}. ({DEFAULT_MODEL}; that of the daemon's namespaces)",
        show_default=False,
    ),
]
PrefillRate = Annotated[float, typer.Option(help="Tokens a second that the GPU prefills.", min=1e-3)]
DiskRate = Annotated[float, typer.Option(help="GB a second that the disk reads.", min=1e-3)]
Sizes = Annotated[str | None, typer.Option(help="Sizes such as 500GiB,2TiB. (1 to 100% of the trace)")]


def plan_sizes(
    trace: Annotated[
        Path | None,
        typer.Argument(
            help="JSON lines, plain or .zst; see docs/operations.md. (the daemon's own record)",
            show_default=False,
        ),
    ] = None,
    model: Model = None,
    prefill_rate: PrefillRate = 5000.0,
    disk_rate: DiskRate = 3.0,
    sizes: Sizes = None,
    interval: Annotated[
        int, typer.Option(help="Tokens between interval units; 0 is off.")
    ] = DEFAULT_INTERVAL,
    as_json: AsJson = False,
    png: Annotated[Path | None, typer.Option(help="Write a picture there.")] = None,
    save: Annotated[Path | None, typer.Option(help="Write the trace there, as JSON lines.")] = None,
    listen: Url = None,
    data: Data = None,
) -> None:
    """Say what each size of the cache would hit on a trace of requests, and the best that could be had."""
    with one_line():
        check_interval(interval)
        if trace is None:
            with Operator(address(listen, data)) as daemon:
                source = _recorded(daemon, model)
        else:
            source = _Source(trace.name, read_trace(trace), model or DEFAULT_MODEL, _token_bytes(model))
        requests, machine = source.trace, Machine(source.token_bytes, prefill_rate, disk_rate * 1e9)
        made = _plan(requests, capacities_of(requests, _sizes(sizes), machine.token_bytes), machine, interval)
        if save is not None:
            write_trace(requests, save)
        if png is not None:
            _draw(made, png, f"{source.name}, {source.model}")
    if as_json:
        print(json.dumps(asdict(made)))
    else:
        _print(made, source.model)


@dataclass(frozen=True, slots=True)
class _Source:
    name: str
    trace: Trace
    model: str
    token_bytes: int


def _token_bytes(model: str | None) -> int:
    return preset(model or DEFAULT_MODEL).token_bytes


def _recorded(daemon: Operator, model: str | None) -> _Source:
    """The daemon's record, and what a token takes of it: by its namespaces, unless a model is named."""
    trace = daemon.record()
    if model is not None:
        return _Source("record", trace, model, _token_bytes(model))
    layouts = {each.namespace.layout.token_bytes: each.namespace.model for each in daemon.namespaces()}
    if len(layouts) != 1:
        raise InvalidArgument(
            f"the daemon's namespaces have tokens of {sorted(layouts)} bytes: name one --model"
        )
    ((token_bytes, name),) = layouts.items()
    return _Source("record", trace, name, token_bytes)


def _plan(requests: Trace, capacities: list[int], machine: Machine, interval: int) -> Plan:
    with progress(*Progress.get_default_columns()) as bar:
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
    console = screen()
    console.print(
        f"{made.requests:,} requests in {made.seconds / 3600:.2f} h, {made.distinct_blocks:,} distinct"
        f" blocks of {made.block_tokens} tokens, {shown(model)}"
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
