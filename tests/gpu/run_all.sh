#!/usr/bin/env bash
# Everything that wants a GPU, in ten minutes at most: the tests, then one JSON table of speeds.
# Usage: tests/gpu/run_all.sh [TABLE.json]. PYTHON names the interpreter (default: python3).
set -euo pipefail
cd "$(dirname "$0")/../.."
export PYTHONPATH="$PWD/src${PYTHONPATH:+:$PYTHONPATH}"
python=${PYTHON:-python3}
"$python" -c 'import torch; print("torch", torch.__version__, "cuda:", torch.cuda.is_available())'
"$python" -m pytest -q tests/gpu
"$python" benchmarks/device_table.py --out "${1:-device_table.json}" ${RATOON_TINY:+--tiny}
