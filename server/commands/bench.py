"""``latentkv bench``: what this host's memory, disk and store can do."""

from __future__ import annotations

import contextlib
import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from pydantic import ByteSize, TypeAdapter, ValidationError
from rich.table import Table

from kvstore.errors import InvalidArgument
from kvstore.layout import PRESETS, preset
from server.commands.daemon import AsJson
from server.commands.failures import one_line
from server.commands.screen import screen
from server.selftest import Measured, SelfTest


def bench(
    directory: Annotated[
        Path, typer.Argument(help="A directory on the disk in question.", show_default=False)
    ],
    size: Annotated[str, typer.Option(help="Bytes of the document.")] = "1GiB",
    model: Annotated[str, typer.Option(help=f"Layout of a block: {', '.join(PRESETS)}.")] = "deepseek-v3",
    payloads: Annotated[str, typer.Option(help="Where blocks lie: lmdb or slab.")] = "lmdb",
    prefill_rate: Annotated[float, typer.Option(help="Tokens a second that your GPU prefills.", min=0)] = 0.0,
    as_json: AsJson = False,
) -> None:
    """Store and load a synthetic document through a daemon of its own, beside what memory and disk can do.

    No running daemon is touched. Needs three times the size on the disk, and once in memory.
    """
    with one_line():
        layout = preset(model)
        with contextlib.closing(SelfTest(directory, _bytes(size), layout, payloads)) as test:
            steps = list(_watched(test))
    loads = [step for step in steps if step.step.startswith("load")]
    rates = {step.step: step.rate / layout.token_bytes for step in loads}
    if as_json:
        shown = [asdict(step) | {"bytes_a_second": step.rate} for step in steps]
        print(json.dumps({"model": model, "payloads": payloads, "steps": shown, "tokens_a_second": rates}))
        return
    console = screen()
    table = Table("step", "GB/s", "time", box=None)
    for step in steps:
        table.add_row(step.step, f"{step.rate / 1e9:.2f}", f"{step.seconds:.2f} s")
    console.print(table)
    for name, rate in rates.items():
        gain = f": {rate / prefill_rate:.1f} times as fast as prefill" if prefill_rate else ""
        console.print(f"{name}: {rate:,.0f} tokens/s of {model}{gain}")


def _watched(test: SelfTest) -> list[Measured]:
    with screen(stderr=True).status("measuring"):
        return list(test.steps())


def _bytes(text: str) -> int:
    try:
        return TypeAdapter(ByteSize).validate_python(text)
    except ValidationError:
        raise InvalidArgument(f"--size {text!r}: write a size such as 1GiB") from None
