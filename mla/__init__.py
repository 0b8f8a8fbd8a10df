"""Absorbed-weight MLA attention, the device pool and the worker. torch lives here only."""
