"""How much memory is left, and what the daemon's HOST tier may take of it."""

from __future__ import annotations

import os
import resource
from pathlib import Path

import torch

from kvstore.settings import StoreSettings

_DEFAULT_HOST = StoreSettings(Path()).host_bytes


def available_bytes(device: torch.device) -> int:
    """Free memory of the device's host, or of the GPU that it is."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return host_available_bytes()


def host_available_bytes() -> int:
    """Memory that could be had without swapping."""
    with open("/proc/meminfo") as meminfo:
        for line in meminfo:
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def smaller_host_bytes() -> int | None:
    """A size for the arena where its default would take more than half of what is free; else None."""
    free = host_available_bytes()
    return free // 4 if free < 2 * _DEFAULT_HOST else None


def peak_bytes() -> int:
    """The most memory that this process has taken so far, the arena that it maps included."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def private_bytes(pid: int) -> int:
    """Resident memory of a process without what it shares, such as an arena."""
    fields = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return sum(int(fields[name].split()[0]) * 1024 for name in ("RssAnon", "RssFile"))


def cpu_seconds(pid: int) -> float:
    """Processor time that a process has taken so far, user and system."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
