"""Is it faster to load a document's cache from disk than to prefill it again?

    python -m benchmarks.disk_vs_prefill --tokens 2048,8192,32768 --json out/run.json --plot out/run.png

For each length: prefill in the fastest of many forms without a store; store through a real
daemon and wait until all is on disk; end the daemon, drop the page cache where that is
permitted, start it again; then the time to the first new token from DISK, HOST and DEVICE, with the
logits checked against the run without a hit, and a control that must fail that check.
"""

from __future__ import annotations

import json
import os
import platform
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from benchmarks.arguments import workplace
from benchmarks.daemon import Daemon
from benchmarks.documents import Prompt, read_prompt
from benchmarks.memory import peak_bytes, smaller_host_bytes
from benchmarks.metering import TokenCounter
from benchmarks.models import Subject, load_subject
from benchmarks.options import BenchmarkError, Options, parse
from benchmarks.plot import draw
from benchmarks.prefill import Prefiller
from benchmarks.report import Projection, Result, answers, table, to_json
from benchmarks.ways import Journey
from kvstore.errors import KVStoreError

Announce = Callable[[str, int], None]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; the exit status is 1 when an exact answer was not exact, 2 on bad input."""
    try:
        options = parse(arguments)
        return _benchmark(options, Console())
    except (BenchmarkError, KVStoreError) as error:
        print(f"disk_vs_prefill: {error}", file=sys.stderr)
        return 2


def _benchmark(options: Options, console: Console) -> int:
    for path in (options.json, options.plot):
        _require_writable(path)
    subject = load_subject(options.model, options.device)
    subject.require_positions(options.tokens[-1])
    prompt = read_prompt(options.document, subject.tokenize, options.tokens[-1])
    flags, memory = _host_flags(options)
    about = _about(options, subject, prompt, memory)
    _introduce(console, about)
    started = time.perf_counter()
    with (
        workplace(options.data, need_bytes=0) as place,
        Daemon(place / "data", flags) as daemon,
        _progress(subject, console) as (counter, say),
    ):
        prefiller = Prefiller(subject, repeats=options.repeats, announce=say)
        journey = Journey(subject, daemon, options, counter, say)
        results = [
            Result(prefiller.fastest(prompt.tokens[:length]), journey.take(prompt.tokens[:length]))
            for length in options.tokens
        ]
    about |= {"seconds": time.perf_counter() - started, "peak_memory_bytes": peak_bytes()}
    _report(console, options, results, about)
    _write(console, options, results, prefiller, about)
    unsound = [result for result in results if not _sound(result, exact=options.exact)]
    for result in [*unsound, results[-1]]:
        console.print(answers(result, exact=options.exact), style="bold", highlight=False)
    return 1 if unsound else 0


def _require_writable(path: Path | None) -> None:
    if path is None:
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.open("ab").close()
    except OSError as error:
        raise BenchmarkError(f"{path} cannot be written: {error.strerror}; name another file") from None


def _host_flags(options: Options) -> tuple[list[str], str]:
    """The daemon's flags for its memory tier, and what to say about it."""
    if options.host_bytes is not None:
        return ["--host-bytes", options.host_bytes], f"{options.host_bytes} of memory as told"
    if (smaller := smaller_host_bytes()) is not None:
        return ["--host-bytes", str(smaller)], f"only {smaller >> 20} MiB of memory, for little is free here"
    return [], "default settings"


@contextmanager
def _progress(subject: Subject, console: Console) -> Iterator[tuple[TokenCounter, Announce]]:
    """A bar that follows the tokens into the model, by the same hook that counts them."""
    counter = TokenCounter(subject.model)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, refresh_per_second=2) as progress:
        bar = progress.add_task("")

        def announce(text: str, tokens: int) -> None:
            progress.reset(bar, description=text, total=tokens or None)

        counter.on_tokens = lambda tokens: progress.advance(bar, tokens)
        yield counter, announce
    counter.close()


def _about(options: Options, subject: Subject, prompt: Prompt, memory: str) -> dict[str, Any]:
    layout = subject.info.layout
    device = subject.model.device
    return {
        "model": subject.name,
        "layout": layout.to_dict(),
        "block_bytes": layout.block_bytes,
        "document": prompt.document,
        "document_copies": prompt.copies,
        "exact": options.exact,
        "prefill_chunk": options.chunk,
        "repeats": options.repeats,
        "daemon": memory,
        "device": torch.cuda.get_device_name(device)
        if device.type == "cuda"
        else f"{device.type}, {platform.machine()}",
        "threads": torch.get_num_threads(),
        "cores": os.cpu_count(),
        "load_average": os.getloadavg(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


def _introduce(console: Console, about: dict[str, Any]) -> None:
    copies = about["document_copies"]
    repeated = f", which is too short and is repeated {copies} times" if copies > 1 else ""
    console.print(
        f"Model {about['model']} ({about['layout']['dtype']}, {about['block_bytes']:,} bytes a block of"
        f" {about['layout']['block_tokens']} tokens) on {about['device']}, {about['threads']} threads.\n"
        f"Document: {about['document']}{repeated}. Daemon: {about['daemon']}.",
        highlight=False,
    )
    if (load := about["load_average"][0]) > about["cores"] / 2:
        console.print(
            f"This machine is busy (load {load:.1f}): the times below are too long.", style="yellow"
        )


def _report(console: Console, options: Options, results: list[Result], about: dict[str, Any]) -> None:
    mode = f"exact mode, C = {options.chunk}" if options.exact else "default mode"
    last = results[-1]
    restart = last.ways.restarts[-1]
    how = "SIGKILL" if options.sigkill else "SIGTERM"
    console.print(table(results, f"Time to the first new token, {about['model']}, {mode}"))
    lines = [
        *(f"Fastest prefill of {result.ways.tokens:,} tokens: {result.prefill_form}." for result in results),
        f"The daemon was ended by {how} (process {restart.pid_before}) and started again (process"
        f" {restart.pid_after}) before each load from DISK; {restart.dropped}.",
        str(Projection.of(last)),
        f"Took {about['seconds']:.0f} s and at most {about['peak_memory_bytes'] / 2**30:.1f} GiB of memory.",
    ]
    for line in lines:
        console.print(line, highlight=False)


def _write(
    console: Console, options: Options, results: list[Result], prefiller: Prefiller, about: dict[str, Any]
) -> None:
    if options.json is not None:
        options.json.write_text(json.dumps(to_json(results, prefiller, about), indent=2) + "\n")
        console.print(f"Figures: {options.json}", highlight=False, soft_wrap=True)
    if options.plot is not None:
        mode = "exact mode" if options.exact else "default mode"
        draw(
            results,
            options.plot,
            f"{about['model']} on {about['device']}, {about['threads']} threads, {mode}",
        )
        console.print(f"Picture: {options.plot}", highlight=False, soft_wrap=True)


def _sound(result: Result, *, exact: bool) -> bool:
    """Whether exact answers were exact, the control was seen, and the daemon was another one."""
    return result.control_changed and result.restarted and (result.identical or not exact)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # so that the daemon ends too
    sys.exit(main())
