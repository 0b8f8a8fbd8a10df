"""A start that is refused says in one line which file or setting, what is wrong with it, and what to do."""

from __future__ import annotations

import errno
import os
import resource
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from kvstore.directory import directory_error
from server.config import ConfigError, listening, load
from tests.server.conftest import DEADLINE, ROOT_DIR

Scene = Callable[[Path, ExitStack], None]


def no_scene(path: Path, stack: ExitStack) -> None:
    pass


def written(name: str, text: str | bytes = "") -> Scene:
    def make(path: Path, stack: ExitStack) -> None:
        file = path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(text if isinstance(text, bytes) else text.encode())

    return make


def directory(name: str) -> Scene:
    return lambda path, stack: (path / name).mkdir(parents=True)


def link(name: str, to: str) -> Scene:
    return lambda path, stack: (path / name).symlink_to(path / to)


def live_datagram(path: Path, stack: ExitStack) -> None:
    odd = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM))
    odd.bind(str(path / "kv.sock"))


@dataclass(frozen=True)
class Refusal:
    """Flags (``{}`` is the directory), what is there before, and what the line says."""

    flags: list[str]
    said: list[str]
    scene: Scene = no_scene
    environment: dict[str, str] = field(default_factory=dict)
    limit: tuple[int, int] | None = None


DATA = ["--data", "{}/data"]
LISTEN = ["--listen", "unix://{}/kv.sock"]
BOTH = [*DATA, *LISTEN]
MOVE = "move it away"
JUNK = written("data/catalog/data.mdb", "x")
FIVE = written("c.toml", "data=5")
REFUSALS = {
    "a file in place of the directory": Refusal(BOTH, ["{}/data: File exists", MOVE], written("data")),
    "a file above": Refusal(
        ["--data", "{}/file/data", *LISTEN], ["{}/file/data: Not a directory", MOVE], written("file")
    ),
    "a broken link": Refusal(BOTH, ["{}/data: File exists", "broken link", MOVE], link("data", "nowhere")),
    "a directory in place of the lock": Refusal(
        BOTH, ["{}/data/LOCK: Is a directory", MOVE], directory("data/LOCK")
    ),
    "a catalogue that is none": Refusal(
        BOTH,
        ["{}/data/catalog: MDB_INVALID", "remove it to start empty"],
        JUNK,
    ),
    "a file in place of the catalogue": Refusal(
        BOTH, ["{}/data/catalog: File exists", MOVE], written("data/catalog")
    ),
    "a file in place of the payloads": Refusal(
        BOTH, ["{}/data/payloads: File exists", MOVE], written("data/payloads")
    ),
    "a name too long": Refusal(["--data", "{}/" + "a" * 300, *LISTEN], ["File name too long", "shorter"]),
    "no data": Refusal(LISTEN, ["data is not set: give --data, LATENTKV_DATA"]),
    "an empty flag": Refusal(["--data", "", *LISTEN], ["data='' (from --data): it is empty: name a path"]),
    "an empty variable": Refusal(
        LISTEN, ["data='' (from LATENTKV_DATA): it is empty"], environment={"LATENTKV_DATA": ""}
    ),
    "an empty file of settings": Refusal(
        BOTH, ["config='' (from LATENTKV_CONFIG): it is empty"], environment={"LATENTKV_CONFIG": ""}
    ),
    "empty credentials": Refusal([*BOTH, "--credentials", ""], ["credentials='' (from --credentials)"]),
    "the home of nobody": Refusal(
        ["--data", "~nobody-here/x", *LISTEN], ["data='~nobody-here/x'", "write the whole path"]
    ),
    "a zero byte": Refusal(
        [*LISTEN, "--config", "{}/c.toml"],
        ["data='/x\\x00y' (from {}/c.toml): no path can hold a zero byte"],
        written("c.toml", 'data = "/x\\u0000y"\n'),
    ),
    "a path that is a number": Refusal(
        [*LISTEN, "--config", "{}/c.toml"],
        ["data=5 (from {}/c.toml): write a path"],
        written("c.toml", "data=5"),
    ),
    "settings that are no TOML": Refusal(
        [*BOTH, "--config", "{}/c.toml"], ["config='{}/c.toml' is no TOML: "], written("c.toml", b"\xff")
    ),
    "settings that are a directory": Refusal(
        [*BOTH, "--config", "{}"], ["config='{}' cannot be read: Is a directory; name a TOML file"]
    ),
    "an unknown setting": Refusal(
        [*BOTH, "--config", "{}/c.toml"],
        ["hots=1 (from {}/c.toml) is no setting; latentkv config show lists them"],
        written("c.toml", "hots=1"),
    ),
    "a size that is none": Refusal([*BOTH, "--ghost-bytes", "4XB"], ["ghost_bytes='4XB' (from --ghost"]),
    "more memory than there is": Refusal(
        [*BOTH, "--host-bytes", "900TiB"], ["host arena of 989560464998400 bytes: only ", "lower host_bytes"]
    ),
    "a file in place of the socket": Refusal(
        BOTH, ["{}/kv.sock exists and is no socket; move it away"], written("kv.sock", "precious")
    ),
    "a file in place of the arena's socket": Refusal(
        BOTH, ["{}/kv.sock.arena exists and is no socket; move it away"], written("kv.sock.arena")
    ),
    "a file in place of the socket's directory": Refusal(
        [*DATA, "--listen", "unix://{}/file/kv.sock"],
        ["listen='unix://{}/file/kv.sock'", "File exists", MOVE],
        written("file"),
    ),
    "a socket of another kind": Refusal(
        BOTH, ["{}/kv.sock is a socket that cannot be asked who listens", "remove it"], live_datagram
    ),
    "a socket with a long name": Refusal(
        [*DATA, "--listen", "unix:///" + "a" * 101], ["longer than 101 bytes; choose a shorter one"]
    ),
    "a socket with a relative name": Refusal(
        [*DATA, "--listen", "unix://kv.sock"], ["listen='unix://kv.sock'", "must be absolute"]
    ),
    "an address of another machine": Refusal(
        [*BOTH, "--http", "203.0.113.1:80"],
        ["http='203.0.113.1:80' cannot be bound (Cannot assign requested address)", "has no such address"],
    ),
    "a host that nobody knows": Refusal(
        [*BOTH, "--http", "nowhere.invalid:80"], ["http='nowhere.invalid:80'", "no such host is known"]
    ),
    "files too small": Refusal(
        BOTH, ["File too large", "raise the limit (ulimit -f)"], limit=(resource.RLIMIT_FSIZE, 1 << 20)
    ),
    "too little address space": Refusal(
        [*BOTH, "--disk-bytes", "60TiB"],
        ["{}/data/catalog: Cannot allocate memory", "raise the limit (ulimit -v)"],
        limit=(resource.RLIMIT_AS, 1 << 30),
    ),
}


@pytest.fixture
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A short path: that of a socket must be."""
    path = Path("/tmp") / f"lkv-{os.getpid()}"
    path.mkdir()
    yield path
    shutil.rmtree(path)


@pytest.mark.parametrize("name", REFUSALS)
def test_a_start_that_is_refused_names_the_file_the_cause_and_the_mend(name: str, place: Path) -> None:
    refusal = REFUSALS[name]
    sizes = ["--host-bytes", "16MiB", "--disk-bytes", "32MiB", "--log-level", "error"]
    flags = [*sizes, *(flag.replace("{}", str(place)) for flag in refusal.flags)]
    with ExitStack() as stack:
        refusal.scene(place, stack)
        before = sorted(path for path in place.rglob("*") if path.is_socket() or path.is_file())

        def limit() -> None:
            if refusal.limit:
                kind, value = refusal.limit
                resource.setrlimit(kind, (value, value))

        ran = subprocess.run(
            [sys.executable, "-m", "server", "serve", *flags],
            cwd=ROOT_DIR,
            capture_output=True,
            text=True,
            timeout=DEADLINE,
            env={name: value for name, value in os.environ.items() if not name.startswith("LATENTKV_")}
            | refusal.environment,
            preexec_fn=limit,
        )
        assert ran.returncode == 2, ran
        assert ran.stderr.startswith("latentkv: "), ran.stderr
        assert ran.stderr.count("\n") == 1, ran.stderr
        for each in refusal.said:
            assert each.replace("{}", str(place)) in ran.stderr
        assert not ran.stdout
        assert all(path.is_socket() or path.is_file() for path in before)  # nothing of others went
        left = {path.name for path in place.iterdir() if path.is_socket()} - {path.name for path in before}
        assert not left


OTHER_USER = """
import os, sys
import server.lifecycle, server.cli, encodings.idna, kvstore.payloads.kinds
sys.argv = ["latentkv", "serve", "--host-bytes", "16MiB", "--disk-bytes", "32MiB", *sys.argv[1:]]
os.setgroups([])
os.setgid(65534)
os.setuid(65534)
server.cli.main()
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--data", "{}/own"], "{}/own/LOCK: Permission denied; {}/own belongs to uid 0 with mode 0700"),
        (["--data", "{}/own/x"], "{}/own/x: Permission denied; {}/own belongs to uid 0 with mode 0700"),
        (
            ["--data", "{}/all/d", "--listen", "unix://{}/own/kv.sock"],
            "{}/own/kv.sock.lock: Permission denied; {}/own belongs to uid 0",
        ),
        (["--config", "{}/own/c.toml"], "config='{}/own/c.toml' cannot be read: Permission denied"),
    ],
)
def test_of_what_belongs_to_another_user_both_are_named(flags: list[str], said: str, place: Path) -> None:
    place.chmod(0o755)
    (place / "own").mkdir(mode=0o700)
    (place / "all").mkdir()
    (place / "all").chmod(0o777)
    given = [each.replace("{}", str(place)) for each in (*flags, *([] if "--listen" in flags else LISTEN))]
    ran = subprocess.run(
        [sys.executable, "-c", OTHER_USER, *given],
        cwd=ROOT_DIR,
        capture_output=True,
        text=True,
        timeout=DEADLINE,
    )
    assert ran.returncode == 2, ran
    assert said.replace("{}", str(place)) in ran.stderr
    assert ran.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("code", "mend"),
    [
        (errno.ENOLCK, "gives no locks: choose a directory on a local disk"),
        (errno.EMFILE, "raise its limit (ulimit -n, LimitNOFILE)"),
        (errno.ENOSPC, "the disk is full: free some of it"),
        (errno.EDQUOT, "the disk quota is used up: raise it"),
        (errno.EIO, "the disk is failing"),
    ],
)
def test_what_the_system_says_of_the_directory_comes_with_what_to_do(code: int, mend: str) -> None:
    said = str(directory_error(Path("/d"), OSError(code, os.strerror(code), "/d/LOCK")))
    assert said.startswith(f"data directory /d cannot be used: /d/LOCK: {os.strerror(code)};")
    assert mend in said


# --- where commands look for the daemon


@pytest.fixture(autouse=True)
def _bare_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("LATENTKV_")]:
        monkeypatch.delenv(name)


def test_the_variable_alone_says_where_the_daemon_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LATENTKV_LISTEN", "127.0.0.1:5000")
    assert listening(None, None) == "127.0.0.1:5000"
    assert listening("127.0.0.1:6000", None) == "127.0.0.1:6000"


def test_settings_that_do_not_matter_keep_no_command_from_the_daemon(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "c.toml").write_text('listen = "127.0.0.1:5000"\nhost_bytes = "many"\n')
    monkeypatch.setenv("LATENTKV_CONFIG", str(tmp_path / "c.toml"))
    monkeypatch.setenv("LATENTKV_DISK_BYTES", "no size")
    assert listening(None, None) == "127.0.0.1:5000"


def test_a_wrong_address_is_told_wherever_it_comes_from(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LATENTKV_LISTEN", "nowhere")
    with pytest.raises(ConfigError, match=r"listen='nowhere' \(from LATENTKV_LISTEN\)"):
        listening(None, None)


def test_without_a_runtime_directory_the_data_says_where_and_else_nobody(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "none"))
    assert listening(None, str(tmp_path)) == f"unix://{tmp_path}/latentkv.sock"
    monkeypatch.setenv("LATENTKV_DATA", str(tmp_path))
    assert listening(None, None) == f"unix://{tmp_path}/latentkv.sock"
    monkeypatch.delenv("LATENTKV_DATA")
    with pytest.raises(ConfigError, match="give --listen, LATENTKV_LISTEN or --data"):
        listening(None, None)


def test_a_tilde_is_the_home_directory_wherever_a_path_is_written(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "c.toml").write_text('data = "~/data"\ncredentials = "~/callers.toml"\n')
    config = load({"listen": "unix://~/kv.sock"}, "~/c.toml")
    assert config.data == tmp_path / "data"
    assert config.credentials == tmp_path / "callers.toml"
    assert config.address == f"unix://{tmp_path}/kv.sock" == listening("unix://~/kv.sock", None)
    monkeypatch.setenv("LATENTKV_DATA", "~/other")
    assert load({}).data == tmp_path / "other"
