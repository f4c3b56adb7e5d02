#!/usr/bin/env bash
# scripts/exactness.sh [--python EXE] [--torch-index URL] [--venv DIR] [options of benchmarks/exactness.py]
#
# Greedy answers of every drafter x shape x batch on small models against plain decoding, 10,000 tokens a cell: an hour or two
# on one core. With `--target FOLDER [--head FOLDER]`: the same on a real model, with fewer tokens. With `--out FILE` a stopped run
# goes on where it was. With --python (first) that interpreter is used as it is and nothing is installed.

set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/setup_env.sh
setup_or_python "$@"
exec "$PY" benchmarks/exactness.py ${REST[@]+"${REST[@]}"}
