"""Drives an LMCache server with the client that LMCache's own benchmark uses. Runs in LMCache's environment.

    python lmcache_driver.py URL TRANSFER_MODE SHAPE TOKENS

Reads commands from stdin, one JSON object a line (``{"op": "store" | "load", "seed": N}``), and
writes one line of JSON for each. It knows nothing of latentkv, which is not installed there.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

from lmcache.cli.commands.bench.server_bench import helpers  # type: ignore[import-not-found]
from lmcache.cli.commands.bench.server_bench.client import (  # type: ignore[import-not-found]
    RequestContext,
    ServerBenchClient,
)
from lmcache.cli.commands.bench.server_bench.config import BenchConfig  # type: ignore[import-not-found]

POLL_SECONDS = 0.001  # its own benchmark waits 50 ms between two looks, which would count against it


class Driver:
    """One worker with a pool of one document."""

    def __init__(self, url: str, mode: str, shape: str, tokens: int) -> None:
        config = BenchConfig(
            rpc_url=url,
            http_url="",
            mode="cpu",
            transfer_mode=mode,
            tp_size=1,
            use_mla=True,
            num_tokens=tokens - 1,  # it puts one in front
            kvcache_shape_spec=shape,
            num_blocks=0,
            block_size=0,
        )
        self._client = ServerBenchClient(config, lambda text: None)
        self._client.start()
        self._count = 0

    def _request(self, seed: int) -> RequestContext:
        self._count += 1
        return self._client.create_request(seed, f"request-{self._count}", "benchmark")

    def store(self, seed: int) -> dict[str, Any]:
        """Store a document."""
        request = self._request(seed)
        started = time.perf_counter()
        result = self._client.store(request, 0, request.num_full_tokens)
        seconds = time.perf_counter() - started
        self._client.end_session(request)
        return {"seconds": seconds, "whole": result.succeeded}

    def load(self, seed: int) -> dict[str, Any]:
        """Look a document up and bring it into the pool."""
        request = self._request(seed)
        connection = self._client._require_started()
        key = helpers._make_key(
            request.token_ids, request.request_id, start=0, end=request.num_full_tokens, world_size=1
        )
        started = time.perf_counter()
        helpers._send_lookup(connection, key, tp_size=1)
        hits = helpers._poll_prefetch_status(connection, key.request_id, 60_000, POLL_SECONDS)
        found = time.perf_counter() - started
        result = self._client.retrieve(request, 0, (hits or 0) * request.chunk_size)
        seconds = time.perf_counter() - started
        self._client.end_session(request)
        whole = hits == request.total_chunks and result is not None and result.succeeded
        return {"seconds": seconds, "lookup_seconds": found, "whole": whole}

    def close(self) -> None:
        """Unregister."""
        self._client.close()


def main() -> None:
    """Serve commands until the end of stdin."""
    url, mode, shape, tokens = sys.argv[1:]
    out, sys.stdout = sys.stdout, sys.stderr  # what the library prints must not get in between
    driver = Driver(url, mode, shape, int(tokens))
    print(json.dumps({"ready": True}), file=out, flush=True)
    for line in sys.stdin:
        command = json.loads(line)
        verb = driver.store if command["op"] == "store" else driver.load
        print(json.dumps(verb(command["seed"])), file=out, flush=True)
    driver.close()


if __name__ == "__main__":
    main()
