"""Callers who mean harm, beside the workers: these must be served, and the HTTP port must answer."""

from __future__ import annotations

import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from benchmarks.soaking import greedy, hostile
from benchmarks.soaking.scene import STUCK_SECONDS, Scene

Burst = partial[Counter[str]]
"""What came back, and how often."""


def hostile_calls(scene: Scene) -> None:
    """Without any proof: messages of a million parts, bytes that are none, streams that say nothing."""
    _beside(scene, _bursts(scene, "bombs", "marks", "babble", "silent_loads"))


def hostile_connections(scene: Scene) -> None:
    """Connections that say nothing, or half a greeting."""
    _beside(scene, _bursts(scene, "idle_connections", "half_handshakes"))


def hostile_resets(scene: Scene) -> None:
    """Thousands of calls, each reset as soon as it is made."""
    _beside(scene, _bursts(scene, "resets"))


def hostile_http(scene: Scene) -> None:
    """The same at the HTTP port, and requests that never end."""
    _beside(scene, _bursts(scene, "idle_http", "slow_http", "endless_headers", "strange_hosts"))


def greedy_tenant(scene: Scene) -> None:
    """Somebody who is admitted takes all that is counted; who comes behind him has as much as before."""
    with greedy.Greedy(scene.daemon.url, scene.callers.greedy) as him:
        _beside(scene, [partial(burst, him) for burst in greedy.BURSTS])
    scene.require_writing()


def _bursts(scene: Scene, *names: str) -> list[Burst]:
    victim = hostile.Victim(scene.daemon.url, scene.daemon.page)
    return [partial(hostile.BURSTS[name], victim) for name in names]


def _beside(scene: Scene, bursts: Sequence[Burst]) -> None:
    """All at once; meanwhile the daemon is asked whether it is well."""
    with ThreadPoolExecutor(len(bursts)) as pool:
        running = [pool.submit(burst) for burst in bursts]
        while not all(each.done() for each in running):
            _require_health(scene)
            scene.await_daemon()
    for burst, each in zip(bursts, running, strict=True):
        name = burst.func.__name__
        scene.seen.callers.update({f"{name}: {came}": count for came, count in each.result().items()})


def _require_health(scene: Scene) -> None:
    try:
        with urllib.request.urlopen(scene.daemon.page + "healthz", timeout=STUCK_SECONDS):
            pass
    except (urllib.error.URLError, TimeoutError, ConnectionError) as error:
        scene.seen.stuck.append({"verb": "healthz", "why": str(error)})
