"""What befalls the daemon's process: signals, the end of a task, a clock that is set."""

from __future__ import annotations

import os
import signal
import time

from benchmarks.soaking.scene import Scene

OWED_AT_ONCE = 8  # documents that are looked for behind each restart
HOUR = 3600.0
STEPS = (-25 * HOUR, -2 * HOUR, 0.0, 2 * HOUR, 25 * HOUR)  # a day is what an unused block lives
TASKS = ("leases", "uses", "expiry", "clock", "workers", "history", "handover", "web")  # beside the writer
STEADY_SECONDS = 65.0  # between two deaths of a task: one that dies again and again is given up


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


def hang_up(scene: Scene) -> None:
    """SIGHUP: it reads its credentials again, and nothing else happens."""
    os.kill(scene.daemon.pid, signal.SIGHUP)
    scene.await_daemon()


def step_clock(scene: Scene) -> None:
    """The wall clock is set by hours or a day, and left so until the next step or start, which is one too."""
    scene.daemon.tell(clock_step=scene.rng.choice(STEPS))
    scene.wait()
    scene.require_owed(OWED_AT_ONCE, loads=1)


def kill_task(scene: Scene) -> None:
    """The writer's loop dies, and another task of the daemon: what comes is written all the same."""
    now = time.monotonic()
    for task in ("writer", scene.rng.choice(TASKS)):
        if now - scene.killed.get(task, 0.0) >= STEADY_SECONDS:
            scene.killed[task] = now
            scene.daemon.tell(kill_task=task)
    scene.require_writing()
