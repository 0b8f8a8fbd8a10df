"""The pieces of ``benchmarks.soak``: requests, the worker's process, what is owed, the faults."""
