#!/bin/sh
# Generates kvstore/v1/ from the .proto with the oldest tools whose output every supported
# grpcio and protobuf accepts: stubs refuse to load under a runtime older than their generator.
# With --check nothing is written; the exit status says whether the committed stubs are fresh.
set -eu

cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-python3}
VENV=.venv-proto
TOOLS="grpcio-tools==1.72.1 protobuf==6.30.2"

if [ "$(cat "$VENV/tools" 2>/dev/null)" != "$TOOLS" ]; then
    "$PYTHON" -m venv --clear "$VENV"
    # shellcheck disable=SC2086
    "$VENV/bin/pip" install --quiet --disable-pip-version-check $TOOLS 'setuptools<81'
    printf '%s' "$TOOLS" > "$VENV/tools"
fi

fresh=$(mktemp -d)
trap 'rm -rf "$fresh"' EXIT
"$VENV/bin/python" -m grpc_tools.protoc -I proto \
    --python_out="$fresh" --pyi_out="$fresh" --grpc_python_out="$fresh" \
    kvstore/v1/kvstore.proto kvstore/v1/operator.proto
printf '"""Stubs generated from proto/kvstore/v1 by proto/generate.sh. Do not edit."""\n' \
    > "$fresh/kvstore/v1/__init__.py"

if [ "${1:-}" = "--check" ]; then
    if ! diff -ru --exclude=__pycache__ "$fresh/kvstore/v1" kvstore/v1; then
        echo "kvstore/v1 differs from a fresh generation: run make proto" >&2
        exit 1
    fi
    exit 0
fi
mkdir -p kvstore/v1
cp "$fresh"/kvstore/v1/* kvstore/v1/
