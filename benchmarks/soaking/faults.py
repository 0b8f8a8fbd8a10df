"""The faults of a soak: each is injected, lasts for a moment and is taken back."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from benchmarks.soaking import caller_faults, daemon_faults, disk_faults, worker_faults
from benchmarks.soaking.scene import Scene

Fault = Callable[[Scene], None]

# None of the last part, in which one daemon lives and its memory is judged.
EARLY: frozenset[Fault] = frozenset(
    {
        # By these its process ends, or may end.
        daemon_faults.kill_daemon,
        daemon_faults.restart_daemon,
        worker_faults.restart_beside_children,
        disk_faults.truncate_file,
        # gRPC itself, not Python's objects, keeps some 60 to 130 bytes of each call that was reset.
        caller_faults.hostile_resets,
    }
)

FAULTS: tuple[Fault, ...] = (
    daemon_faults.kill_daemon,
    daemon_faults.restart_daemon,
    daemon_faults.stop_daemon,
    daemon_faults.hang_up,
    daemon_faults.step_clock,
    daemon_faults.kill_task,
    worker_faults.kill_worker,
    worker_faults.stop_worker,
    worker_faults.kill_stopped_worker,
    worker_faults.withhold_credits,
    worker_faults.squat,
    worker_faults.drop_loads,
    worker_faults.fork_workers,
    worker_faults.kill_forked_worker,
    worker_faults.restart_beside_children,
    worker_faults.store_beyond_disk,
    disk_faults.fill_disk,
    disk_faults.bad_places,
    disk_faults.flip_byte,
    disk_faults.truncate_file,
    disk_faults.delete_file,
    disk_faults.fail_writes,
    disk_faults.fail_reads,
    disk_faults.fail_frees,
    disk_faults.tear_writes,
    disk_faults.lie_in_reads,
    disk_faults.slow_disk,
    caller_faults.hostile_calls,
    caller_faults.hostile_connections,
    caller_faults.hostile_resets,
    caller_faults.hostile_http,
    caller_faults.greedy_tenant,
)


def in_order(rng: random.Random, faults: Sequence[Fault]) -> list[Fault]:
    """A round of them, at random, but that those of ``EARLY`` come in its first half.

    So even a soak of one round has a daemon that lives through its last part.
    """
    only_early = [fault for fault in faults if fault in EARLY]
    others = [fault for fault in faults if fault not in EARLY]
    rng.shuffle(others)
    between = max(0, len(faults) // 2 - len(only_early))
    early = only_early + others[:between]
    rng.shuffle(early)
    return early + others[between:]
