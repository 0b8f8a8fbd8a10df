"""Tables and text on the terminal, in which nothing that others named is taken for markup or obeyed."""

from __future__ import annotations

from rich.console import Console
from rich.progress import Progress, ProgressColumn
from rich.table import Table
from rich.text import Text

from kvstore.showing import shown


def screen(*, stderr: bool = False, soft_wrap: bool = False) -> Console:
    """A console that prints text as it is: no ``[bold]``, no ``:name:``, and no colours by guess."""
    return Console(stderr=stderr, soft_wrap=soft_wrap, markup=False, emoji=False, highlight=False)


def add_row(table: Table, *cells: object) -> None:
    """A row of names and figures as they are; what is no text, such as a bar, stays as it is."""
    table.add_row(*(Text(shown(each)) if isinstance(each, str) else each for each in cells))  # type: ignore[arg-type]


def progress(*columns: ProgressColumn) -> Progress:
    """A bar on standard error that goes when it is full; none where nobody looks."""
    console = screen(stderr=True)
    return Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
