"""The faults of a soak: each is injected, lasts for a moment and is taken back."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

from benchmarks.soaking.requests import DOCUMENTS, SPACES
from benchmarks.soaking.scene import WORKERS, Scene
from kvstore.settings import MIB
from kvstore.testing.chains import content

OWED_AT_ONCE = 8  # documents that are looked for behind each restart
FILE_BYTES = 32 * MIB  # no file of the store is larger


def kill_daemon(scene: Scene) -> None:
    """SIGKILL, and a new one on the same data."""
    scene.daemon.stop(kill=True)
    _start_again(scene)


def restart_daemon(scene: Scene) -> None:
    """SIGTERM: it makes durable what it has, ends, and comes back."""
    scene.daemon.stop(kill=False)
    if scene.daemon.ended_by != 0:
        scene.seen.deaths.append(f"SIGTERM ended the daemon with {scene.daemon.ended_by}")
    _start_again(scene)


def _start_again(scene: Scene) -> None:
    time.sleep(scene.rng.uniform(0.0, 0.5))
    scene.daemon.start()
    scene.await_daemon()
    scene.require_owed(OWED_AT_ONCE, loads=2)


def stop_daemon(scene: Scene) -> None:
    """SIGSTOP, often for longer than a call's deadline."""
    os.kill(scene.daemon.pid, signal.SIGSTOP)
    time.sleep(scene.rng.uniform(0.2, 3.0))
    os.kill(scene.daemon.pid, signal.SIGCONT)
    scene.await_daemon()


def kill_worker(scene: Scene) -> None:
    """SIGKILL, in the midst of whatever it does."""
    scene.replace_worker(scene.rng.randrange(WORKERS))


def stop_worker(scene: Scene) -> None:
    """SIGSTOP, in the midst of whatever it does."""
    worker = scene.rng.choice(scene.workers)
    worker.stop()
    time.sleep(scene.rng.uniform(0.2, 4.0))
    worker.go_on()


def kill_stopped_worker(scene: Scene) -> None:
    """A worker that was stopped while it held something, and never comes back."""
    number = scene.rng.randrange(WORKERS)
    scene.workers[number].stop()
    time.sleep(scene.rng.uniform(0.2, 1.5))
    scene.replace_worker(number)


def withhold_credits(scene: Scene) -> None:
    """Workers that keep what was announced to them."""
    for worker in scene.workers:
        worker.order("hold", scene.rng.uniform(0.5, 3.0))
    _wait(scene)


def squat(scene: Scene) -> None:
    """Workers that hold slots which they have half filled, and then give them up; one dies of it."""
    for worker in scene.workers:
        worker.order("squat", scene.rng.uniform(0.5, 2.0))
    _wait(scene)
    scene.replace_worker(scene.rng.randrange(WORKERS))


def fill_disk(scene: Scene) -> None:
    """No file may grow, or write beyond some byte of it: writes fail, in part or altogether."""
    scene.daemon.limit_files(scene.rng.choice([4096, scene.rng.randrange(4096, FILE_BYTES)]))
    _wait(scene)
    scene.daemon.limit_files(None)


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
    _wait(scene)
    scene.daemon.tell(delay=0.0)


def _switch(scene: Scene, name: str) -> None:
    scene.daemon.tell(**{name: True})
    _wait(scene)
    scene.daemon.tell(**{name: False})


def _switch_and_spoil(scene: Scene, name: str) -> None:
    began = time.monotonic()
    _switch(scene, name)
    time.sleep(0.3)  # what had begun comes to its end
    scene.ledger.spoil(began, time.monotonic())


def _wait(scene: Scene) -> None:
    time.sleep(scene.rng.uniform(0.2, 1.5))


FAULTS: tuple[Callable[[Scene], None], ...] = (
    kill_daemon,
    restart_daemon,
    stop_daemon,
    kill_worker,
    stop_worker,
    kill_stopped_worker,
    withhold_credits,
    squat,
    fill_disk,
    flip_byte,
    truncate_file,
    delete_file,
    fail_writes,
    fail_reads,
    fail_frees,
    tear_writes,
    lie_in_reads,
    slow_disk,
)
