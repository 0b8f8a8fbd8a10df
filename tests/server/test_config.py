"""Flags over environment over TOML over defaults; a wrong value is one line that names it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from server.config import Config, ConfigError, load
from tests.server.conftest import ROOT_DIR


@pytest.fixture(autouse=True)
def _bare_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in Config.model_fields:
        monkeypatch.delenv(f"LATENTKV_{name.upper()}", raising=False)
    monkeypatch.delenv("LATENTKV_CONFIG", raising=False)


@pytest.fixture
def toml(tmp_path: Path) -> Path:
    file = tmp_path / "latentkv.toml"
    file.write_text('data = "/from/toml"\nhost_bytes = "1GiB"\ndisk_bytes = "2GiB"\ninterval = 64\n')
    return file


def test_defaults_hold_where_nothing_is_set() -> None:
    config = load({"data": "/d"})
    assert (config.host_bytes, config.disk_bytes, config.interval) == (4 << 30, 50 << 30, 2048)
    assert (config.policy, config.codec) == ("unit", "raw")
    assert config.address.startswith("unix:///")


def test_flags_win_over_environment_over_file_over_defaults(
    toml: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LATENTKV_HOST_BYTES", "3GiB")
    monkeypatch.setenv("LATENTKV_DISK_BYTES", "4GiB")
    config = load({"host_bytes": "512MiB", "codec": None}, str(toml))
    assert config.host_bytes == 512 << 20
    assert config.disk_bytes == 4 << 30
    assert (config.interval, config.data) == (64, Path("/from/toml"))
    assert config.readers == 8


def test_the_environment_names_the_file(toml: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LATENTKV_CONFIG", str(toml))
    assert load({}).interval == 64


def test_the_configuration_is_frozen() -> None:
    with pytest.raises(ValueError, match="frozen"):
        load({"data": "/d"}).interval = 64


def test_sizes_are_read_with_units_and_as_plain_numbers() -> None:
    sizes = [load({"data": "/d", "host_bytes": text}).host_bytes for text in ("67108864", "64MiB", "0.5GiB")]
    assert sizes == [64 << 20, 64 << 20, 512 << 20]


@pytest.mark.parametrize("listen", ["127.0.0.1:0", "localhost:5000", "[::1]:5000", "unix:///run/x.sock"])
def test_loopback_and_sockets_may_be_listened_on(listen: str) -> None:
    assert load({"data": "/d", "listen": listen}).address == listen


WRONG = {
    "host_bytes": ["4GB2", "", "-1", "12"],
    "disk_bytes": ["many", "1024"],
    "interval": ["65", "-64", "x"],
    "policy": ["lru"],
    "codec": ["gzip"],
    "lease_seconds": ["0", "soon"],
    "drain_seconds": ["-1"],
    "readers": ["0"],
    "http": ["127.0.0.1:80/page", "127.0.0.1", "unix:///run/x.sock"],
    "tenant_quotas": ["acme=1GiB"],
    "numa_node": ["left", "-1"],
    "log_level": ["loud"],
    "listen": [
        "0.0.0.0:80",
        "example.org:80",
        "127.0.0.1",
        "127.0.0.1:99999",
        "unix://x",
        "tls://0.0.0.0:80",
        "tls://host",
        f"unix:///{'x' * 101}",
    ],
}


@pytest.mark.parametrize(("name", "value"), [(name, value) for name in WRONG for value in WRONG[name]])
@pytest.mark.parametrize("source", ["flag", "environment", "file"])
def test_a_wrong_value_is_one_line_with_setting_value_and_source(
    source: str, name: str, value: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flags, file = {"data": "/d"}, tmp_path / "latentkv.toml"
    file.write_text(f'{name} = "{value}"\n' if source == "file" else "")
    if source == "flag":
        flags[name] = value
    elif source == "environment":
        monkeypatch.setenv(f"LATENTKV_{name.upper()}", value)
    with pytest.raises(ConfigError) as raised:
        load(flags, str(file))
    line = str(raised.value)
    named = {
        "flag": f"--{name.replace('_', '-')}",
        "environment": f"LATENTKV_{name.upper()}",
        "file": str(file),
    }
    assert "\n" not in line
    assert line.startswith(name)
    assert value in line
    assert named[source] in line


def test_what_is_missing_unknown_or_unreadable_is_named(tmp_path: Path) -> None:
    file = tmp_path / "bad.toml"
    with pytest.raises(ConfigError, match="data is not set: give --data"):
        load({})
    file.write_text("hots_bytes = 5")
    with pytest.raises(ConfigError, match=r"hots_bytes=5 .*bad.toml.* is no setting"):
        load({"data": "/d"}, str(file))
    file.write_text("=")
    with pytest.raises(ConfigError, match=r"bad.toml.* is no TOML"):
        load({"data": "/d"}, str(file))
    with pytest.raises(ConfigError, match=r"absent.toml.* cannot be read"):
        load({"data": "/d"}, str(tmp_path / "absent.toml"))


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--data", "{}", "--host-bytes", "4GB2"], "host_bytes='4GB2' (from --host-bytes)"),
        (["--data", "{}", "--listen", "0.0.0.0:1"], "write tls://host:port"),
        (["--data", "{}/file/under"], "file"),
        ([], "data is not set"),
    ],
)
def test_the_command_says_so_in_one_line_and_exits_with_2(
    flags: list[str], said: str, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    given = [flag.format(tmp_path) for flag in flags]
    done = subprocess.run(
        [sys.executable, "-m", "server", "serve", *given], cwd=ROOT_DIR, capture_output=True, text=True
    )
    assert done.returncode == 2
    assert done.stderr.startswith("latentkv: ")
    assert done.stderr.count("\n") == 1
    assert said in done.stderr
    assert not done.stdout
