"""What befalls the disk: files that are harmed, reads and writes that fail, lie or take long."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

from benchmarks.soaking.requests import DOCUMENTS, SPACES
from benchmarks.soaking.scene import Scene
from kvstore.settings import MIB
from kvstore.testing.chains import content

FILE_BYTES = 32 * MIB  # no file of the store is larger
BAD_BYTES = (4096, 64 << 10, MIB)


def fill_disk(scene: Scene) -> None:
    """No file may grow, or write beyond some byte of it: writes fail, in part or altogether."""
    scene.daemon.limit_files(scene.rng.choice([4096, scene.rng.randrange(4096, FILE_BYTES)]))
    scene.wait()
    scene.daemon.limit_files(None)


def bad_places(scene: Scene) -> None:
    """A range of each size's first slab can neither be written nor read: what comes is written elsewhere.

    LMDB chooses its pages itself, so there such a disk is one that fails: ``fail_writes``.
    """
    began, first = time.monotonic(), scene.rng.randrange(0, FILE_BYTES // 4, 4096)
    scene.daemon.tell(bad_places=[["slab-8-0", first, first + scene.rng.choice(BAD_BYTES)]])
    scene.require_writing()
    scene.wait()
    scene.daemon.tell(bad_places=[])
    scene.ledger.spoil(began, time.monotonic())  # what lay there is dropped


def flip_byte(scene: Scene) -> None:
    """A byte of a block on disk is not what was written."""
    for _ in range(20):
        document = (scene.rng.randrange(len(SPACES)), scene.rng.randrange(DOCUMENTS))
        block = scene.rng.choice(scene.chain(document))
        nbytes = SPACES[document[0]].layout.block_bytes
        if _flip(scene, block, nbytes):
            return


def _flip(scene: Scene, block: bytes, nbytes: int) -> bool:
    right = content(block, nbytes)
    for file in _payload_files(scene, nbytes):
        at = file.read_bytes().find(right)
        if at >= 0:
            offset = scene.rng.randrange(nbytes)
            scene.ledger.damage(block)
            with open(file, "r+b") as damaged:
                damaged.seek(at + offset)
                damaged.write(bytes([right[offset] ^ 1 << scene.rng.randrange(8)]))
            scene.ledger.damage(block)
            return True
    return False


def _payload_files(scene: Scene, nbytes: int) -> list[Path]:
    files = (scene.daemon.data / "payloads" / str(nbytes)).glob("*")
    return sorted(file for file in files if file.name != "lock.mdb")


def truncate_file(scene: Scene) -> None:
    """A payload file is cut short under the daemon, which may die of it and is started again."""
    _harm(scene, lambda file: os.truncate(file, scene.rng.randrange(0, 1 + file.stat().st_size)))


def delete_file(scene: Scene) -> None:
    """A payload file is deleted under the daemon."""
    _harm(scene, Path.unlink)


def _harm(scene: Scene, harm: Callable[[Path], None]) -> None:
    nbytes = scene.rng.choice(sorted({space.layout.block_bytes for space in SPACES}))
    files = _payload_files(scene, nbytes)
    if not files:
        return
    began = time.monotonic()
    harm(scene.rng.choice(files))
    # What is under way may still be confirmed, and lie in a file that is no more.
    time.sleep(0.5)
    scene.supervise(excused=True)
    scene.ledger.spoil(began, time.monotonic())


def fail_writes(scene: Scene) -> None:
    """Each write of payloads fails."""
    _switch(scene, "fail_writes")


def fail_reads(scene: Scene) -> None:
    """Each read of a payload fails."""
    _switch(scene, "fail_reads")


def fail_frees(scene: Scene) -> None:
    """No payload can be freed."""
    _switch(scene, "fail_frees")


def tear_writes(scene: Scene) -> None:
    """Only half of each payload reaches the disk, and nobody says so."""
    _switch_and_spoil(scene, "tear_writes")


def lie_in_reads(scene: Scene) -> None:
    """Each read brings a wrong byte; the store drops what it can't prove, and so loses what is right."""
    _switch_and_spoil(scene, "lie_in_reads")


def slow_disk(scene: Scene) -> None:
    """Each read and write takes longer."""
    scene.daemon.tell(delay=scene.rng.uniform(0.01, 0.3))
    scene.wait()
    scene.daemon.tell(delay=0.0)


def _switch(scene: Scene, name: str) -> None:
    scene.daemon.tell(**{name: True})
    scene.wait()
    scene.daemon.tell(**{name: False})


def _switch_and_spoil(scene: Scene, name: str) -> None:
    began = time.monotonic()
    _switch(scene, name)
    time.sleep(0.3)  # what had begun comes to its end
    scene.ledger.spoil(began, time.monotonic())
