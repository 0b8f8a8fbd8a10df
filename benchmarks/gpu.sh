#!/usr/bin/env bash
# All that needs a GPU, in one go: the environment, the CUDA tests, the data path into a device
# pool, and DeepSeek-V2-Lite's size with 128K tokens. Ends within 8 minutes, if need be unfinished.
#
#     PYTHON=python3 DATA=/fast/disk benchmarks/gpu.sh
#
# A torch with CUDA that PYTHON has is used; else one is installed. Figures: out/gpu/*.json.
# The data directory needs 40 GB, the device 45 GB, the host 24 GB.
set -u
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-python3}
DATA=${DATA:-out}
OUT=out/gpu
VENV=.venv-gpu
END=$((SECONDS + 470))

if ! nvidia-smi -L; then
    echo "gpu.sh: there is no NVIDIA GPU here; run it on a host that has one" >&2
    exit 2
fi
mkdir -p "$OUT"
failed=()

step() { # name, most seconds, command...
    local name=$1 most=$2 left=$((END - SECONDS)) started=$SECONDS
    shift 2
    if [ "$left" -lt "$most" ]; then most=$left; fi
    echo "== $name"
    : > "$OUT/$name.log"
    if [ "$most" -gt 0 ] && timeout "$most" "$@" > "$OUT/$name.log" 2>&1; then
        echo "   done after $((SECONDS - started)) s"
    else
        echo "   FAILED or out of time after $((SECONDS - started)) s; see $OUT/$name.log"
        failed+=("$name")
    fi
    tail -n 25 "$OUT/$name.log"
}

environment() {
    "$PYTHON" -m venv --system-site-packages "$VENV" &&
        "$VENV/bin/python" -m pip install --quiet --editable '.[bench]' pytest pytest-timeout hypothesis &&
        "$VENV/bin/python" -c 'import torch, transformers; print(torch.__version__, transformers.__version__, torch.cuda.get_device_name())'
}
export -f environment
export PYTHON VENV

step environment 240 bash -c environment
if [ "${#failed[@]}" -ne 0 ]; then exit 1; fi
step cuda-tests 90 "$VENV/bin/python" -m pytest -q -rs tests/mla/test_cuda.py tests/mla/test_transfer.py
step data-path 100 "$VENV/bin/python" -m benchmarks.data_path --device cuda --layout deepseek-v3 --blocks 256 \
    --rounds 3 --arena 2GiB --payloads slab --data "$DATA" --json "$OUT/data-path.json"
step disk-vs-prefill 300 "$VENV/bin/python" -m benchmarks.disk_vs_prefill --device cuda --model deepseek-v2-lite \
    --tokens 131072 --chunk 4096 --repeats 1 --host-bytes 8GiB --data "$DATA" \
    --json "$OUT/disk-vs-prefill.json" --plot "$OUT/disk-vs-prefill.png"

echo "== ${#failed[@]} of 4 steps failed: ${failed[*]:-none} (after $SECONDS s)"
[ "${#failed[@]}" -eq 0 ]
