#!/usr/bin/env bash
# scripts/gpu_check.sh [--python EXE] [--torch-index URL] [--venv DIR] [--parts tests,kernels,sanitizer,exactness,a,b,c,d,decoding] [options of benchmarks/decoding.py]
#
# On a machine with a GPU, part by part (all of them, or those named, each a few minutes): the tests, which are of a CPU and do not see
# the device; the tests of kernels and recorded passes on the device; the kernels under compute-sanitizer where it is installed; the short
# exactness grid on the device, drafts verified by recorded passes; the parts of benchmarks/gpu.py, whose tables go to
# benchmarks/results/<device>/; and, with --target FOLDER, the decoding benchmark on a real model. With --python (first) that interpreter
# is used as it is and nothing is installed.

set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/setup_env.sh
setup_or_python "$@"

PARTS=tests,kernels,sanitizer,exactness,a,b,c,d
OPTIONS=()
while ((${#REST[@]})); do
  case ${REST[0]} in
    --parts)
      ((${#REST[@]} > 1)) || STATUS=2 fail "--parts needs a value; see scripts/${0##*/} --help"
      PARTS=${REST[1]} REST=("${REST[@]:2}")
      ;;
    *) OPTIONS+=("${REST[0]}") REST=("${REST[@]:1}") ;;
  esac
done
((${#OPTIONS[@]})) && PARTS+=,decoding
for part in ${PARTS//,/ }; do
  case $part in
    tests | kernels | sanitizer | exactness | a | b | c | d | decoding) ;;
    *) STATUS=2 fail "unknown part $part; see scripts/${0##*/} --help" ;;
  esac
done

"$PY" -c 'import torch, sys; sys.exit(not torch.cuda.is_available())' ||
  fail "torch.cuda.is_available() is false for $PY: this check needs a GPU and a torch built for it. Without one run scripts/test.sh."

sanitized() {
  if command -v compute-sanitizer >/dev/null; then
    compute-sanitizer --tool memcheck --error-exitcode 1 "$PY" tests/kernels/tree_attention_cases.py cuda
    compute-sanitizer --tool memcheck --error-exitcode 1 "$PY" tests/kernels/rules_cases.py cuda
  else
    echo "compute-sanitizer is not installed: the kernels were not checked for reads and writes out of bounds"
  fi
}

for part in ${PARTS//,/ }; do
  echo "== $part"
  case $part in
    tests) CUDA_VISIBLE_DEVICES='' "$PY" -m pytest -q -m "not slow and not engine" ;;
    kernels) "$PY" -m pytest -q tests/kernels tests/decoding/test_rounds.py ;;
    sanitizer) sanitized ;;
    exactness) "$PY" benchmarks/exactness.py --quick --device cuda ;;
    d) "$PY" benchmarks/gpu.py --parts d --models 8b ;; # transformers compiles a model for a minute at each batch
    a | b | c) "$PY" benchmarks/gpu.py --parts "$part" ;;
    decoding) "$PY" benchmarks/decoding.py ${OPTIONS[@]+"${OPTIONS[@]}"} ;;
  esac
done
