"""Adapters that put the device pool behind the engines people run."""
