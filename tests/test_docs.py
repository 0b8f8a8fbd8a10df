"""The docs name every setting and command, and nothing in them has gone stale."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from kvstore.api import MissReason
from kvstore.settings import StoreSettings
from server.cli import app
from server.config import Config
from server.explaining.comparison import CHANGED, EXTENDED, RETOKENISED, SHIFTED
from server.explaining.hints import CAUSES

ROOT = Path(__file__).parent.parent
PAGES = [
    ROOT / "README.md",
    ROOT / "README.zh-CN.md",
    ROOT / "ARCHITECTURE.md",
    *sorted((ROOT / "docs").glob("*.md")),
]


def test_every_setting_is_documented_and_every_documented_setting_exists():
    table = (ROOT / "docs" / "settings.md").read_text()
    documented = set(re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE))
    assert documented == set(Config.model_fields)


def test_every_setting_of_the_store_is_a_setting_of_the_daemon():
    assert set(StoreSettings.__dataclass_fields__) <= set(Config.model_fields)


def leaves(command: Any, path: str = "") -> Iterator[str]:
    """The full names of the commands under a group."""
    for name, below in command.commands.items():
        if isinstance(below, typer.core.TyperGroup):
            yield from leaves(below, f"{path}{name} ")
        else:
            yield path + name


def test_every_command_is_documented_and_every_documented_command_exists():
    documented = set(
        re.findall(r"^\| `latentkv ([\w ]+)` \|", (ROOT / "docs" / "commands.md").read_text(), re.MULTILINE)
    )
    assert documented == set(leaves(typer.main.get_command(app)))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_and_named_modules_exist(page: Path):
    text = page.read_text()
    for link in re.findall(r"\]\((?!https?:)([^)#]+)", text):
        assert (page.parent / link).exists(), link
    for module in re.findall(r"`((?:kvstore|server|mla|benchmarks)/[\w/]+\.py)`", text):
        assert (ROOT / module).exists(), module


@pytest.mark.parametrize(("page", "least"), [("reliability", 20), ("security", 10)])
def test_every_proof_that_a_page_names_exists(page: str, least: int):
    text = (ROOT / "docs" / f"{page}.md").read_text()
    files = set(re.findall(r"`(tests/[\w/]+\.py)`", text))
    assert all((ROOT / file).exists() for file in files), files
    defined = "".join(file.read_text() for file in (ROOT / "tests").rglob("test_*.py"))
    defined += "".join(file.read_text() for file in (ROOT / "kvstore" / "testing").glob("*_conformance.py"))
    named = set(re.findall(r"`(test_\w+)`", text))
    for name in named:
        assert f"def {name}(" in defined, name
    assert len(files | named) >= least


def test_the_chinese_readme_says_the_same():
    english, chinese = ((ROOT / name).read_text() for name in ("README.md", "README.zh-CN.md"))
    for same in (
        r"^```.*?^```$",  # the examples, to the letter
        r"\]\(((?!README)[^)]+)\)",
        r"\d[\d.,]*\d",
        r"^(#+|[-|]) ",
        r"`[^`\n]+`",
    ):
        found = [sorted(re.findall(same, text, re.MULTILINE | re.DOTALL)) for text in (english, chinese)]
        assert found[0] == found[1], same


def test_every_reason_of_a_miss_and_every_cause_is_in_troubleshooting():
    documented = set(
        re.findall(r"^\| `(\w+)` \|", (ROOT / "docs" / "troubleshooting.md").read_text(), re.MULTILINE)
    )
    causes = {hint.cause for hint in (*CAUSES, CHANGED, EXTENDED, RETOKENISED, SHIFTED)}
    assert documented == {*MissReason, *causes}


def test_readme_is_short():
    assert (ROOT / "README.md").read_text().count("\n") < 150
