#!/usr/bin/env bash
# scripts/gpu_check.sh [--python EXE] [--torch-index URL] [--venv DIR] [options of benchmarks/decoding.py]
#
# The tests and the decoding benchmark on a machine with a GPU. With --python (first) that interpreter is
# used as it is and nothing is installed.

set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/setup_env.sh
setup_or_python "$@"
"$PY" -c 'import torch, sys; sys.exit(not torch.cuda.is_available())' ||
  fail "torch.cuda.is_available() is false for $PY: this check needs a GPU and a torch built for it. Without one run scripts/test.sh."
"$PY" -m pytest -q -m "not slow"
exec "$PY" benchmarks/decoding.py ${REST[@]+"${REST[@]}"}
