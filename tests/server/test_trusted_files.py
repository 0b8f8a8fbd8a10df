"""Files that say whom the daemon trusts can be changed by nobody but root and its own user."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from server.config import ConfigError, load
from server.credentials import CredentialFile, CredentialsError
from server.tls import Certificate
from server.trusted_files import MAX_BYTES, UntrustedFile, read_trusted
from tests.server.conftest import Fleet
from tests.server.test_commands import latentkv
from tests.server.test_tenants import AS_ROOT, STRANGER, entry
from tests.server.test_tls import Authority

Flags = Callable[..., list[str]]
TEXT = entry("a", "uid = 1", ["t"])


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A credentials file, two directories down."""
    made = tmp_path / "outer" / "inner" / "credentials.toml"
    made.parent.mkdir(parents=True)
    made.write_text(TEXT)
    return made


def refused(file: Path, said: str) -> None:
    with pytest.raises(CredentialsError, match=said) as raised:
        CredentialFile(file)
    assert str(raised.value).startswith(str(file))
    assert "\n" not in str(raised.value)


def test_what_only_we_can_change_is_read(file: Path) -> None:
    assert len(CredentialFile(file)) == 1
    assert read_trusted(file).data == TEXT.encode()


@pytest.mark.parametrize("mode", [0o620, 0o602, 0o666])
def test_a_file_that_others_may_write(file: Path, mode: int) -> None:
    file.chmod(mode)
    refused(file, "may be written by others; chmod go-w it")


@pytest.mark.parametrize("above", [1, 2])
@pytest.mark.parametrize("mode", [0o770, 0o707])
def test_a_directory_that_others_may_write(file: Path, above: int, mode: int) -> None:
    directory = file.parents[above - 1]
    directory.chmod(mode)
    refused(file, f"others may write the directory {directory} ")
    directory.chmod(mode | 0o1000)  # in a sticky one nobody replaces what is ours
    assert len(CredentialFile(file)) == 1


@AS_ROOT
@pytest.mark.parametrize("above", [0, 1, 2])
def test_what_another_user_owns(file: Path, above: int) -> None:
    owned = [file, *file.parents][above]
    os.chown(owned, STRANGER, STRANGER)
    refused(file, f"owned by uid {STRANGER}, who could .*; chown it to root or to uid {os.geteuid()}")


@AS_ROOT
def test_a_link_of_another_user_in_a_directory_for_everybody(file: Path, tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o1777)
    link = shared / "credentials.toml"
    link.symlink_to(file)
    assert len(CredentialFile(link)) == 1
    os.chown(link, STRANGER, STRANGER, follow_symlinks=False)
    refused(link, f"the link {link} is owned by uid {STRANGER}")


def test_links_as_kubernetes_mounts_a_secret_are_followed(tmp_path: Path) -> None:
    mount = tmp_path / "mount"
    (mount / "..2026_12_01").mkdir(parents=True)
    mount.chmod(0o1777)
    (mount / "..2026_12_01" / "credentials.toml").write_text(TEXT)
    (mount / "..data").symlink_to("..2026_12_01")
    (mount / "credentials.toml").symlink_to("..data/credentials.toml")
    assert len(CredentialFile(mount / "credentials.toml")) == 1
    # What a link leads through counts, too.
    (mount / "..2026_12_01").chmod(0o777)
    refused(mount / "credentials.toml", "others may write the directory")


def test_links_in_a_circle(tmp_path: Path) -> None:
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b").symlink_to("a")
    refused(tmp_path / "a", "links")


def test_a_path_that_climbs_is_followed(file: Path) -> None:
    assert len(CredentialFile(file.parent / ".." / "inner" / file.name)) == 1


def test_what_is_no_regular_file(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    refused(pipe, "is no regular file")
    refused(tmp_path, "is no regular file|Is a directory")
    refused(Path("/dev/null"), "is no regular file")
    refused(tmp_path / "absent", "cannot be read: No such file")


def test_a_file_without_end(file: Path) -> None:
    os.truncate(file, MAX_BYTES + 1)
    refused(file, f"larger than {MAX_BYTES} bytes")


def test_a_table_in_tables_without_end(file: Path) -> None:
    file.write_text("a = " + "[" * 100_000)
    refused(file, "is no TOML")


def test_at_a_signal_a_pipe_or_a_strangers_file_changes_nothing(
    fleet: Fleet, flags: Flags, file: Path
) -> None:
    daemon = fleet.daemon(*flags(credentials=file))
    file.unlink()
    os.mkfifo(file, 0o600)
    daemon.process.send_signal(signal.SIGHUP)
    daemon.wait_for("event=credentials_refused")
    file.unlink()
    file.write_text(TEXT)
    file.chmod(0o666)
    daemon.process.send_signal(signal.SIGHUP)
    daemon.wait_for("event=credentials_refused", 2)
    file.chmod(0o600)
    daemon.process.send_signal(signal.SIGHUP)
    daemon.wait_for("event=credentials_read")
    assert daemon.term() == 0


def test_a_daemon_does_not_start_with_a_pipe(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    line = latentkv("serve", "--data", f"{tmp_path}/data", "--credentials", f"{tmp_path}/pipe", code=2)
    assert "is no regular file" in line


# --- certificates


def settings(tmp_path: Path, authority: Authority) -> dict[str, str]:
    cert, key = authority.issue("localhost")
    named = {
        "data": f"{tmp_path}/data",
        "listen": "tls://127.0.0.1:0",
        "tls_cert": str(cert),
        "tls_key": str(key),
    }
    return named | {"tls_client_ca": str(authority.ca)}


@pytest.mark.parametrize("setting", ["tls_cert", "tls_key", "tls_client_ca"])
def test_a_tls_file_that_others_may_write_or_that_is_a_pipe(tmp_path: Path, setting: str) -> None:
    named = settings(tmp_path, Authority.of(tmp_path / "authority"))
    Path(named[setting]).chmod(0o666)
    with pytest.raises(ConfigError, match=f"{setting}: .* may be written by others"):
        Certificate(load(named))
    Path(named[setting]).unlink()
    os.mkfifo(named[setting])
    with pytest.raises(ConfigError, match=f"{setting}: .* is no regular file"):
        Certificate(load(named))


def test_a_key_that_all_may_read_is_warned_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    named = settings(tmp_path, Authority.of(tmp_path / "authority"))
    Path(named["tls_key"]).chmod(0o640)
    Certificate(load(named))
    assert "tls_key_readable" not in caplog.text
    Path(named["tls_key"]).chmod(0o644)
    Certificate(load(named))
    assert f"event=tls_key_readable file={named['tls_key']}" in caplog.text


def test_an_untrusted_file_is_an_error_of_its_own(file: Path) -> None:
    file.chmod(0o666)
    with pytest.raises(UntrustedFile):
        read_trusted(file)
