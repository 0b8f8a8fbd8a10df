"""The figures of ``data_path``: medians, paired ratios, their bounds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from statistics import median
from typing import Any

from rich.table import Table

from benchmarks.data_path_rounds import MATCH_BLOCKS, Round
from benchmarks.ratios import Ratio

WAYS = {  # name -> (its limit's name in the figures, what the limit is)
    "cold": ("raw_read", "raw O_DIRECT read"),
    "warm": ("memcpy", "memcpy"),
    "store": ("memcpy", "memcpy"),
    "write": ("raw_write", "raw O_DIRECT write"),
}


def pairs(way: str, rounds: Sequence[Round]) -> tuple[list[float], list[float]]:
    """Value and limit of each round, in bytes a second. Of raw I/O the best depth of the round counts."""
    values: dict[str, list[float]] = {
        "cold": [r.cold for r in rounds],
        "warm": [median(r.warm) for r in rounds],
        "store": [r.store for r in rounds],
        "write": [r.write for r in rounds],
    }
    limits: dict[str, list[float]] = {
        "cold": [max(r.raw_read.values()) for r in rounds],
        "warm": [median(r.warm_memcpy) for r in rounds],
        "store": [median(r.store_memcpy) for r in rounds],
        "write": [max(r.raw_write.values()) for r in rounds],
    }
    return values[way], limits[way]


def figures(rounds: Sequence[Round], about: dict[str, Any], peers: dict[str, Any]) -> dict[str, Any]:
    """All that is known of a run, ready for JSON. Rates in GB/s (1e9 bytes)."""
    result: dict[str, Any] = {}
    for way, (limit, _) in WAYS.items():
        ratio = Ratio.of(*pairs(way, rounds))
        result |= {
            f"{way}_gbps": ratio.value / 1e9,
            f"{way}_ratio": ratio.ratio,
            f"{way}_ratio_low": ratio.low,
        }
        if limit != "memcpy":
            result[f"{limit}_gbps"] = ratio.limit / 1e9
    result["memcpy_gbps"] = median(v for r in rounds for v in (*r.warm_memcpy, *r.store_memcpy)) / 1e9
    result |= {
        "match_ms_p50": 1e3 * median(seconds for r in rounds for seconds in r.match_seconds),
        "match_blocks": MATCH_BLOCKS,
        "daemon_rss_bytes": max(r.daemon_rss for r in rounds),
        "peers": peers,
    }
    return result | {"about": about, "rounds": [asdict(r) for r in rounds]}


def table(result: dict[str, Any], title: str) -> Table:
    """The figures for people."""
    made = Table(title=title)
    made.add_column("")
    for head in ("GB/s", "limit GB/s", "ratio", "10% bound"):
        made.add_column(head, justify="right")
    for way, (limit, what) in WAYS.items():
        made.add_row(
            f"{way}, of {what}",
            f"{result[f'{way}_gbps']:.2f}",
            f"{result[f'{limit}_gbps']:.2f}",
            f"{result[f'{way}_ratio']:.3f}",
            f"{result[f'{way}_ratio_low']:.3f}",
        )
    made.add_section()
    made.add_row(f"Match of {result['match_blocks']} blocks, p50", f"{result['match_ms_p50']:.2f} ms")
    made.add_row("daemon without arena", f"{result['daemon_rss_bytes'] / 1e6:.0f} MB")
    for peer, found in result["peers"].items():
        for row in found.get("runs", ()):
            made.add_section()
            for way in ("cold", "warm", "store"):
                made.add_row(
                    f"{peer}, chunks of {row['chunk_tokens']} tokens: {way}",
                    f"{row[f'{way}_gbps']:.2f}",
                    "",
                    f"ours {result[f'{way}_gbps'] / row[f'{way}_gbps']:.1f} x",
                )
    return made
