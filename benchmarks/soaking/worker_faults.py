"""What workers do wrong, and what befalls them."""

from __future__ import annotations

import contextlib
import time

from benchmarks.soaking.daemon_faults import kill_daemon
from benchmarks.soaking.requests import SPACES
from benchmarks.soaking.scene import DISK_BYTES, WORKERS, Scene
from kvstore.errors import KVStoreError
from kvstore.hashing import block_hashes
from kvstore.testing.chains import tokens

CHILD_SECONDS = 60.0  # that a forked child lives at most: longer than anything may be held for it
BEYOND_SECONDS = 20.0  # in which a document larger than the disk is stored, or given up


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
    scene.wait()


def squat(scene: Scene) -> None:
    """Workers that hold slots which they have half filled, and then give them up; one dies of it."""
    for worker in scene.workers:
        worker.order("squat", scene.rng.uniform(0.5, 2.0))
    scene.wait()
    scene.replace_worker(scene.rng.randrange(WORKERS))


def drop_loads(scene: Scene) -> None:
    """Workers that forget a Load behind its first blocks: nobody ends it but the garbage collector."""
    for worker in scene.workers:
        worker.order("drop", 1.0)
    scene.wait()


def fork_workers(scene: Scene) -> None:
    """Workers fork in the midst of whatever they do; the children try to use the store, and live on."""
    for worker in scene.workers:
        worker.order("fork", scene.rng.uniform(0.5, CHILD_SECONDS))
    scene.wait()


def kill_forked_worker(scene: Scene) -> None:
    """SIGKILL of a worker whose child lives on: what the worker held is given back nonetheless."""
    number = scene.rng.randrange(WORKERS)
    scene.workers[number].order("fork", CHILD_SECONDS)
    scene.workers[number].heard("forked", CHILD_SECONDS)
    scene.replace_worker(number)


def restart_beside_children(scene: Scene) -> None:
    """The daemon is killed and started again while forked children live."""
    fork_workers(scene)
    kill_daemon(scene)


def store_beyond_disk(scene: Scene) -> None:
    """A document larger than the disk: declined, and what comes behind it is written all the same."""
    blocks = DISK_BYTES // SPACES[0].layout.block_bytes + 1
    hashes = block_hashes(scene.asker.keys[0], tokens(scene.rng.randrange(1 << 30), blocks))
    with contextlib.suppress(KVStoreError):
        if scene.asker.store_long(0, hashes, BEYOND_SECONDS):
            scene.seen.violated.append(f"{blocks} blocks are said to be durable, which no disk here holds")
    scene.require_writing()
