"""The daemon that owns the tiers on one host."""

import os

# gRPC's C core writes a line to stderr for each handshake that fails: a stranger could write our log full.
# It looks at this when it is imported, so it stands here; who wants the lines sets the variable himself.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")
