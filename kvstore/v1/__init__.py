"""Stubs generated from proto/kvstore/v1 by proto/generate.sh. Do not edit."""
