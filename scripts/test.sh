#!/usr/bin/env bash
# scripts/test.sh [--torch-index URL] [--venv DIR] [options of pytest]
#
# Runs the tests in the virtual environment of scripts/quickstart.sh, after installing what they need; without options of
# pytest in two processes.
# With `-m slow`: the tests on the real small model. Options of pytest named like ours go after `--`.

set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/setup_env.sh
parse_options "$@"
setup_env "$DEV_EXTRAS"
((${#REST[@]})) || REST=(-n 2 --dist loadfile)
exec "$PY" -m pytest -q ${REST[@]+"${REST[@]}"}
