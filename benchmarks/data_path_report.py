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
    """Value and limit of each round, in bytes a second.

    Of raw I/O that depth counts which is best over the run: a round's own best would be the luckiest
    of four draws, beside one draw of ours.
    """
    values: dict[str, list[float]] = {
        "cold": [r.cold for r in rounds],
        "warm": [median(r.warm) for r in rounds],
        "store": [r.store for r in rounds],
        "write": [r.write for r in rounds],
    }
    limits: dict[str, list[float]] = {
        "cold": _best_depth([r.raw_read for r in rounds]),
        "warm": [median(r.warm_memcpy) for r in rounds],
        "store": [median(r.store_memcpy) for r in rounds],
        "write": _best_depth([r.raw_write for r in rounds]),
    }
    return values[way], limits[way]


def _best_depth(rounds: Sequence[dict[int, float]]) -> list[float]:
    best = max(rounds[0], key=lambda depth: median(rates[depth] for rates in rounds))
    return [rates[best] for rates in rounds]


def _bare(rounds: Sequence[Round]) -> dict[str, float]:
    """How near cold and write come to bare calls that read, check and copy, or copy, check and write."""
    read = Ratio.of([r.cold for r in rounds], [r.bare_read for r in rounds])
    write = Ratio.of([r.write for r in rounds], [r.bare_write for r in rounds])
    return {
        "bare_read_gbps": read.limit / 1e9,
        "cold_of_bare": read.ratio,
        "bare_write_gbps": write.limit / 1e9,
        "write_of_bare": write.ratio,
    }


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
    result |= _bare(rounds)
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
    for way, bare, what in (
        ("cold", "bare_read", "read, xxh3, copy"),
        ("write", "bare_write", "copy, xxh3, write"),
    ):
        made.add_row(
            f"{way}, of bare calls: {what}",
            "",
            f"{result[f'{bare}_gbps']:.2f}",
            f"{result[f'{way}_of_bare']:.3f}",
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
