"""The daemon that owns the tiers on one host."""
