"""Files that say whom the daemon trusts: nobody but root and its own user may be able to change them.

Whoever may write a file, or put another in its place, decides what it says. So the file, the
directories above it, and the links that lead to it are looked at.
"""

from __future__ import annotations

import os
import stat
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

MAX_BYTES = 1 << 20
_MAX_LINKS = 40  # as the kernel has it
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


class UntrustedFile(Exception):
    """The file cannot be read, or others could change it; the message is one line that says the mend."""


@dataclass(frozen=True, slots=True)
class TrustedFile:
    """What a file held, and who may read it."""

    data: bytes
    mode: int

    @property
    def open_to_all(self) -> bool:
        """Whether every user of this host may read it."""
        return bool(self.mode & stat.S_IROTH)


def read_trusted(path: Path) -> TrustedFile:
    """Read a regular file that only root and our user can change. Never waits. Raises ``UntrustedFile``."""
    try:
        for step in _way_to(path.absolute()):
            _check_step(path, step)
        # A pipe would otherwise keep us waiting for its writer.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY)
        with open(descriptor, "rb") as file:
            found = os.fstat(descriptor)
            _check_file(path, found)
            data = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise UntrustedFile(f"{path} cannot be read: {error.strerror}") from None
    if len(data) > MAX_BYTES:
        raise UntrustedFile(f"{path} is larger than {MAX_BYTES} bytes; name the right file")
    return TrustedFile(data, found.st_mode)


def _check_file(path: Path, found: os.stat_result) -> None:
    if not stat.S_ISREG(found.st_mode):
        raise UntrustedFile(f"{path} is no regular file; name one")
    if not _ours(found):
        raise UntrustedFile(f"{path} is owned by uid {found.st_uid}, who could change it; {_chown(path)}")
    if found.st_mode & _OTHERS_WRITE:
        raise UntrustedFile(f"{path} may be written by others; chmod go-w it")


def _check_step(path: Path, step: Path) -> None:
    """A directory or a link on the way to the file."""
    found = step.lstat()
    if stat.S_ISLNK(found.st_mode):
        if not _ours(found):
            raise UntrustedFile(
                f"{path}: the link {step} is owned by uid {found.st_uid}, who could change it; make it anew"
            )
        return
    if not stat.S_ISDIR(found.st_mode):
        return
    if not _ours(found):
        raise UntrustedFile(
            f"{path}: the directory {step} is owned by uid {found.st_uid}, who could put another file there;"
            f" {_chown(step)}"
        )
    # In a sticky directory, such as /tmp, nobody can replace what is another's.
    if found.st_mode & _OTHERS_WRITE and not found.st_mode & stat.S_ISVTX:
        raise UntrustedFile(
            f"{path}: others may write the directory {step} and put another file there; chmod go-w it"
        )


def _way_to(path: Path) -> Iterator[Path]:
    """Every directory and link that is passed on the way to an absolute path, and its end."""
    at, ahead, links = Path("/"), deque(path.parts[1:]), 0
    yield at
    while ahead:
        part = ahead.popleft()
        if part == "..":
            at = at.parent
            continue
        step = at / part
        yield step
        if not step.is_symlink():
            at = step
            continue
        links += 1
        if links > _MAX_LINKS:
            raise UntrustedFile(f"{path} leads through more than {_MAX_LINKS} links; name the file itself")
        target = step.readlink()
        if target.is_absolute():
            at = Path("/")
        ahead.extendleft(reversed([part for part in target.parts if part != "/"]))


def _ours(found: os.stat_result) -> bool:
    """Whether root or our user owns it, or whoever owns all files here."""
    return found.st_uid in (0, os.geteuid(), Path("/").stat().st_uid)


def _chown(path: Path) -> str:
    return f"chown it to root or to uid {os.geteuid()}, which the daemon runs as"
