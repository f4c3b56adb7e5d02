#!/usr/bin/env bash
# scripts/gpu_check.sh [--python EXE] [--torch-index URL] [--venv DIR] [options of benchmarks/decoding.py]
#
# On a machine with a GPU: the tests (those of the kernels run on the device), the kernels under compute-sanitizer
# where it is installed, the kernels' benchmark, and the decoding benchmark. With --python (first) that
# interpreter is used as it is and nothing is installed.

set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/setup_env.sh
setup_or_python "$@"
"$PY" -c 'import torch, sys; sys.exit(not torch.cuda.is_available())' ||
  fail "torch.cuda.is_available() is false for $PY: this check needs a GPU and a torch built for it. Without one run scripts/test.sh."
"$PY" -m pytest -q -m "not slow"
if command -v compute-sanitizer >/dev/null; then
  compute-sanitizer --tool memcheck --error-exitcode 1 "$PY" tests/kernels/tree_attention_cases.py cuda
else
  echo "compute-sanitizer is not installed: the kernels were not checked for reads and writes out of bounds"
fi
"$PY" benchmarks/gpu.py
exec "$PY" benchmarks/decoding.py ${REST[@]+"${REST[@]}"}
