"""``latentkv explain``: why a prompt matched no further, and how two prompts part."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from kvstore.errors import Unavailable
from kvstore.layout import BLOCK_TOKENS
from kvstore.showing import escaped, shown
from kvstore.wire import NotUnderstood
from server.commands.daemon import AsJson, Data, Operator, Url, address
from server.commands.failures import AWAY, one_line
from server.commands.screen import add_row, screen
from server.commands.status import moment
from server.explaining.comparison import Comparison, Side, compare
from server.explaining.explanation import Elsewhere, Explanation, choose, explain, unavailable
from server.explaining.prompts import BYTES, open_tokenizer, read_prompt
from server.explaining.reasons import FATES

_SHOWN_UNITS = 12

Source = Annotated[
    str,
    typer.Argument(
        metavar="PROMPT",
        help="File with a JSON list of token ids, or with text; - is stdin.",
        show_default=False,
    ),
]
TokenizerName = Annotated[
    str | None,
    typer.Option(
        "--tokenizer", help=f"A checkpoint's directory, a tokenizer.json, or {BYTES!r}. Text needs it."
    ),
]
Special = Annotated[
    bool,
    typer.Option(
        help="Add the tokenizer's own tokens around a text; a rendered chat template has them already."
    ),
]
Against = Annotated[
    str | None,
    typer.Option(help="Compare with this prompt instead of asking the daemon.", show_default=False),
]
Chosen = Annotated[
    str | None, typer.Option("--namespace", help="Digest, or its beginning, as status --json lists it.")
]
Tenant = Annotated[str | None, typer.Option(help="Tenant of the namespace.")]
Model = Annotated[str | None, typer.Option(help="Model of the namespace.")]
Align = Annotated[
    int, typer.Option(help="Tokens that hits are rounded down to: prefill_chunk of an exact session.", min=1)
]


def explain_prompt(
    prompt: Source,
    tokenizer: TokenizerName = None,
    special_tokens: Special = True,
    against: Against = None,
    namespace: Chosen = None,
    tenant: Tenant = None,
    model: Model = None,
    align: Align = BLOCK_TOKENS,
    listen: Url = None,
    data: Data = None,
    as_json: AsJson = False,
) -> None:
    """Say how far a prompt matches and why it stops there; or, with --against, where two prompts part."""
    with one_line():
        reader = open_tokenizer(tokenizer, special=special_tokens)
        ours = read_prompt(prompt, reader)
        if against is not None:
            compared = compare(ours, read_prompt(against, reader))
            _print_json(asdict(compared)) if as_json else _show_comparison(compared, screen())
            return
        try:
            with Operator(address(listen, data)) as daemon:
                opened = daemon.namespaces()
                found = explain(daemon, opened, choose(opened, namespace, tenant, model), ours, align)
        except NotUnderstood:
            raise
        except Unavailable:
            if not as_json:
                raise
            _print_json(unavailable())
            raise typer.Exit(AWAY) from None
        _print_json(asdict(found)) if as_json else _show(found, screen())


def _print_json(value: dict[str, Any]) -> None:
    print(json.dumps(value))


def _show(found: Explanation, console: Console) -> None:
    space = found.namespace
    console.print(
        f"{found.tokens:,} tokens, tenant {shown(space['tenant'])}, model {shown(space['model'])}"
        f" ({space['digest']})\n"
        f"hit {_of(found.hit_tokens, found.tokens)}: HOST {found.host_tokens:,}, DISK {found.disk_tokens:,};"
        f" stored {_of(found.stored_tokens, found.tokens)}"
    )
    console.print(f"\nIt stops there because {found.why} ({found.reason}).")
    if found.stops_at is not None:
        console.print(
            f"The first block that is not stored is {found.stops_at.block}: tokens {found.stops_at.token:,}"
            f" to {found.stops_at.last_token:,}."
        )
        _show_place(found.stops_at.before, found.stops_at.after, console)
    if found.gone is not None:
        fate = FATES.get(found.gone["why"], found.gone["why"])
        console.print(f"It was {escaped(fate)} on {moment(found.gone['at'])}.")
    _show_units(found, console)
    if found.elsewhere:
        console.print(_elsewhere(found.elsewhere))
    console.print(f"{found.advice}")


def _show_units(found: Explanation, console: Console) -> None:
    for title, ends in (
        (
            "Units of this prompt end at token",
            [f"{u['tokens']:,} ({', '.join(u['kinds'])})" for u in found.units],
        ),
        ("Units that go on from there end at token", [f"{tokens:,}" for tokens in found.beyond]),
    ):
        if ends:
            more = f" and {len(ends) - _SHOWN_UNITS} more" if len(ends) > _SHOWN_UNITS else ""
            console.print(f"{title} {', '.join(ends[:_SHOWN_UNITS])}{more}.")


def _elsewhere(others: list[Elsewhere]) -> Table:
    table = Table(
        "namespace", "stored", "hit", "differs in", "here", "there", title="Other namespaces have more"
    )
    for each in others:
        for number, (name, (ours, theirs)) in enumerate(each.differs.items()):
            first = (each.digest, f"{each.stored_tokens:,}", f"{each.hit_tokens:,}")
            add_row(table, *(("", "", "") if number else first), name, ours, theirs)
    return table


def _show_comparison(found: Comparison, console: Console) -> None:
    console.print(
        f"{_of(found.shared_tokens, found.ours.tokens)} are shared, {found.shared_blocks:,} whole blocks;"
        f" the other prompt has {found.theirs.tokens:,} tokens."
    )
    if found.diverging_block is not None:
        console.print(
            f"They part at token {found.shared_tokens:,}, in block {found.diverging_block:,};"
            f" the last {found.resumes:,} tokens are the same again."
        )
        for title, side in (("here", found.ours), ("there", found.theirs)):
            _show_side(title, found.before, side, console)
    for hint in found.hints:
        console.print(f"{hint.cause}: {hint.advice}")


def _show_side(title: str, before: str, side: Side, console: Console) -> None:
    console.print(f"{title}, {side.differing_tokens:,} tokens:")
    _show_place(before, side.differs, console)


def _show_place(before: str, after: str, console: Console) -> None:
    if before or after:
        console.print(Text("  …").append(_flat(before)).append(_flat(after) or "(nothing)", "bold reverse"))


def _flat(text: str) -> str:
    return escaped(text.replace("\n", "⏎"))


def _of(part: int, whole: int) -> str:
    return f"{part:,} tokens ({part / whole:.1%})"
