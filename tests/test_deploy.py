"""What is in deploy/ names only metrics, labels and settings that exist."""

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from server.config import ENV_PREFIX, Config

yaml = pytest.importorskip("yaml")

ROOT = Path(__file__).parent.parent
DEPLOY = ROOT / "deploy"
SUFFIXES = {"histogram": ("_bucket", "_sum", "_count"), "counter": ("",), "gauge": ("",)}
ADDED = {"instance", "job"}  # by Prometheus itself


def exported() -> dict[str, set[str]]:
    """Series to their labels, by docs/metrics.md, which is held against a real scrape."""
    table = (ROOT / "docs" / "metrics.md").read_text()
    rows = re.findall(r"^\| `(\w+)` \| (\w+) \| ([\w, ]*)\|", table, re.MULTILINE)
    return {
        name + suffix: set(re.findall(r"\w+", labels)) | ({"le"} if suffix == "_bucket" else set()) | ADDED
        for name, kind, labels in rows
        for suffix in SUFFIXES[kind]
    }


def alerts() -> Iterator[tuple[str, str]]:
    for group in yaml.safe_load((DEPLOY / "alerts.yml").read_text())["groups"]:
        for rule in group["rules"]:
            yield rule["alert"], rule["expr"]


def panels() -> Iterator[tuple[str, str]]:
    for panel in json.loads((DEPLOY / "dashboard.json").read_text())["panels"]:
        for target in panel["targets"]:
            yield panel["title"], target["expr"]


@pytest.mark.parametrize("expression", [*alerts(), *panels()], ids=lambda each: each[0])
def test_an_expression_names_only_series_and_labels_that_exist(expression: tuple[str, str]) -> None:
    series, text = exported(), expression[1]
    named = re.findall(r"\b(latentkv_\w+)(?:\{([^}]*)\})?", text)
    assert named or text.startswith('up{job="latentkv"}')
    for name, selector in named:
        assert name in series
        assert set(re.findall(r"(\w+)\s*[=!]~?", selector)) <= series[name]
    for labels in re.findall(r"by \(([^)]*)\)", text):
        asked = set(re.findall(r"\w+", labels))
        assert all(asked <= series[name] for name, _ in named)
    assert text.count("(") == text.count(")")


def test_alerts_are_explained_and_explained_alerts_exist() -> None:
    page = (ROOT / "docs" / "operations.md").read_text()
    assert set(re.findall(r"`(Latentkv\w+)`", page)) == {name for name, _ in alerts()}


def test_the_unit_sets_settings_that_exist() -> None:
    unit = (DEPLOY / "latentkv.service").read_text()
    named = re.findall(rf"{ENV_PREFIX}(\w+)=", unit)
    assert named
    assert {name.lower() for name in named} <= set(Config.model_fields)
    stop = re.search(r"TimeoutStopSec=(\d+)", unit)
    assert stop is not None
    assert int(stop[1]) > Config.model_fields["drain_seconds"].default
