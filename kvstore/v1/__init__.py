"""Stubs generated from proto/kvstore/v1/kvstore.proto by proto/generate.sh. Do not edit."""
