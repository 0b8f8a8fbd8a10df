"""``latentkv warm``: documents prefilled ahead of time.

The model is behind an entry point: this package knows no torch, and a daemon alone needs none.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from importlib.metadata import entry_points
from pathlib import Path
from typing import Annotated, Any, Protocol

import typer
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn

import kvstore
from kvstore.errors import InvalidArgument, KVStoreError, Unavailable
from kvstore.identity import Identity
from kvstore.showing import escaped
from server.commands.daemon import AsJson, Data, Operator, Url, address
from server.commands.failures import NO, one_line
from server.commands.screen import progress, screen
from server.commands.status import size
from server.commands.units import span_seconds

WARMERS = "latentkv.warmers"  # entry points, by the name of the framework
_TIMEOUT = 10.0  # seconds that a call of the daemon may take
_FLUSH_SECONDS = 120.0


class Warmed(Protocol):
    """What became of a document; see ``mla/warming.py``."""

    @property
    def name(self) -> str: ...
    @property
    def tokens(self) -> int: ...
    @property
    def whole_tokens(self) -> int: ...
    @property
    def computed_tokens(self) -> int: ...
    @property
    def stored_tokens(self) -> int: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def seconds(self) -> float: ...
    @property
    def unit(self) -> str: ...
    @property
    def done(self) -> bool: ...


class Warmer(Protocol):
    """A model in front of the store."""

    def read(self, text: bytes) -> Sequence[int]: ...

    def warm(self, documents: Sequence[tuple[str, Sequence[int]]]) -> Iterator[Warmed]: ...

    def flush(self, timeout: float) -> bool: ...


@dataclass(frozen=True, slots=True)
class Summary:
    """All documents. ``saves_seconds``: prefill time that one hit of each will save, at this run's rate."""

    documents: int
    stored: int
    tokens: int
    stored_tokens: int
    computed_tokens: int
    nbytes: int
    seconds: float
    tokens_a_second: float | None  # None if nothing was computed
    saves_seconds: float | None
    on_disk: bool
    pinned: int
    failed: list[str]
    no_text: list[str]  # files that are none, and why


def warm(
    directory: Annotated[Path, typer.Argument(help="Directory of text files.", show_default=False)],
    model: Annotated[
        str, typer.Option(help="A checkpoint's directory, or 'tiny', the built-in one.", show_default=False)
    ],
    pattern: Annotated[str, typer.Option(help="Which files, below the directory too.")] = "*",
    device: Annotated[str | None, typer.Option(help="cuda, cpu, ... (a GPU if there is one)")] = None,
    exact: Annotated[bool, typer.Option("--exact", help="For exact sessions.")] = False,
    prefill_chunk: Annotated[int, typer.Option(help="Tokens of a forward pass.", min=64)] = 512,
    tenant: Annotated[str, typer.Option(help="Tenant of the namespace.")] = "default",
    salt: Annotated[str, typer.Option(help="Salt of the namespace.")] = "",
    pin_for: Annotated[
        str | None, typer.Option(help="Keep them for a time such as 30min, 12h or 7d.", show_default=False)
    ] = None,
    listen: Url = None,
    data: Data = None,
    as_json: AsJson = False,
) -> None:
    """Prefill documents ahead of time. What is stored is skipped, so it may be run again and again."""
    with one_line():
        files = _files(directory, pattern)
        warmer_class = _warmer()
        seconds = span_seconds(pin_for, "--pin-for") if pin_for is not None else 0.0
        store = kvstore.connect(address(listen, data), timeout=_TIMEOUT, identity=Identity.from_environment())
        try:
            store.status()  # before a model is loaded for nothing
        except Unavailable as error:
            raise Unavailable(f"{error}; warm stores through a running daemon") from None
        options = {"device": device, "exact": exact, "prefill_chunk": prefill_chunk}
        with (
            Operator(address(listen, data)) as daemon,
            warmer_class(store, model, tenant=tenant, salt=salt, **options) as warmer,
        ):
            summary = _run(warmer, _Pins(daemon, seconds), directory, files, as_json)
        store.close()
    if as_json:
        print(json.dumps(asdict(summary)))
    else:
        _show(summary)
    if summary.failed or summary.no_text:
        raise typer.Exit(NO)


class _Pins:
    """Pins for so many seconds; none for 0. A pin is given once the unit is on disk."""

    def __init__(self, daemon: Operator, seconds: float) -> None:
        self._daemon = daemon
        self._seconds = seconds
        self.given = 0

    def keep(self, unit: str) -> str | None:
        """Pin a unit; what went wrong, if something did."""
        if not self._seconds or not unit:
            return None
        try:
            self._daemon.pin(self._seconds, unit=unit)
        except KVStoreError as error:
            return f"not pinned: {error}"
        self.given += 1
        return None


def _files(directory: Path, pattern: str) -> list[Path]:
    if not directory.is_dir():
        raise InvalidArgument(f"{directory} is no directory; name one with text files")
    files = sorted(path for path in directory.rglob(pattern) if path.is_file())
    if not files:
        raise InvalidArgument(f"{directory} has no file {pattern!r}")
    return files


def _warmer() -> Callable[..., AbstractContextManager[Warmer]]:
    for found in entry_points(group=WARMERS):
        try:
            loaded: Callable[..., AbstractContextManager[Warmer]] = found.load()
        except ImportError as error:
            raise InvalidArgument(f"warm needs a model ({error}): pip install 'latentkv[mla]'") from None
        return loaded
    raise InvalidArgument(f"no entry point {WARMERS} is installed: pip install latentkv anew")


def _run(warmer: Warmer, pins: _Pins, directory: Path, files: list[Path], as_json: bool) -> Summary:
    documents, failed, no_text = [], [], []
    for path in files:
        name = str(path.relative_to(directory))
        try:
            text = path.read_bytes()
            if (why := why_no_text(text)) is not None:
                no_text.append(f"{name}: {why}")
            else:
                documents.append((name, warmer.read(text)))
        except InvalidArgument as error:
            failed.append(f"{name}: {error}")
        except OSError as error:  # it went meanwhile, or is another user's
            failed.append(f"{name}: it cannot be read ({error.strerror})")
    done: list[Warmed] = []
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with progress(*columns) as bar:
        task = bar.add_task("prefilling, tokens", total=sum(len(tokens) for _, tokens in documents))
        for each in warmer.warm(documents):
            done.append(each)
            bar.advance(task, each.tokens)
            if as_json:
                print(json.dumps(_line(each)), flush=True)
            if not each.done:
                failed.append(f"{each.name}: {each.stored_tokens} of {each.whole_tokens} tokens are stored")
            elif (wrong := pins.keep(each.unit)) is not None:
                failed.append(f"{each.name}: {wrong}")
    on_disk = warmer.flush(_FLUSH_SECONDS)
    return _summary(len(files), done, failed, no_text, on_disk=on_disk, pinned=pins.given)


def why_no_text(raw: bytes) -> str | None:
    """Why a file's bytes are no text that could be a prompt; None if they are."""
    at = raw.find(b"\0")
    if at >= 0:
        return f"no text: byte {at} is zero, as in a binary file or in UTF-16"
    try:
        raw.decode()
    except UnicodeDecodeError as error:
        return f"no text: byte {error.start} (0x{raw[error.start]:02x}) is no UTF-8; convert it first"
    return None


def _line(each: Warmed) -> dict[str, Any]:
    return {
        "document": each.name,
        "tokens": each.tokens,
        "stored_tokens": each.stored_tokens,
        "computed_tokens": each.computed_tokens,
        "seconds": each.seconds,
        "unit": each.unit,
    }


def _summary(
    documents: int,
    done: list[Warmed],
    failed: list[str],
    no_text: list[str],
    *,
    on_disk: bool,
    pinned: int,
) -> Summary:
    computed = sum(each.computed_tokens for each in done)
    stored = sum(each.stored_tokens for each in done)
    busy = sum(each.seconds for each in done if each.computed_tokens)
    rate = computed / busy if computed and busy else None
    return Summary(
        documents=documents,
        stored=sum(each.done for each in done),
        tokens=sum(each.tokens for each in done),
        stored_tokens=stored,
        computed_tokens=computed,
        nbytes=sum(each.nbytes for each in done),
        seconds=sum(each.seconds for each in done),
        tokens_a_second=rate,
        saves_seconds=stored / rate if rate else None,
        on_disk=on_disk,
        pinned=pinned,
        failed=failed,
        no_text=no_text,
    )


def _show(summary: Summary) -> None:
    console = screen()
    where = "on disk" if summary.on_disk else "in memory"
    console.print(
        f"{summary.stored:,} of {summary.documents:,} documents are stored: {summary.stored_tokens:,} of"
        f" {summary.tokens:,} tokens, {size(summary.nbytes)}, {where}; {summary.computed_tokens:,} were"
        f" computed in {summary.seconds:.1f} s, the rest was there."
    )
    if summary.saves_seconds is not None:
        console.print(
            f"At {summary.tokens_a_second:,.0f} tokens a second, one hit of each will save"
            f" {summary.saves_seconds:,.1f} s of prefill, less the time to load it."
        )
    if summary.pinned:
        console.print(f"{summary.pinned:,} units are pinned; latentkv units list --pins shows them.")
    if summary.no_text:
        console.print(
            f"{len(summary.no_text):,} of the files are no text and were left out; --pattern chooses others."
        )
    for line in summary.no_text:
        console.print(f"left out: {escaped(line)}")
    for line in summary.failed:
        console.print(f"failed: {escaped(line)}")
