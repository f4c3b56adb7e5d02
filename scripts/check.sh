#!/usr/bin/env bash
# scripts/check.sh [--torch-index URL] [--venv DIR]
#
# Everything that reads the code without running it: ruff, mypy, the levels, repeated code, the length
# budgets. Runs all parts, fails if any failed.

set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/setup_env.sh
parse_options "$@"
((${#REST[@]} == 0)) || STATUS=2 fail "unknown option ${REST[0]}; see scripts/check.sh --help"
setup_env "$DEV_EXTRAS"

failed=0
part() {
  echo "== $*"
  "$@" || failed=1
}
part "$PY" -m ruff check .
part "$PY" -m mypy spectrain
part "$VENV/bin/lint-imports" --no-logo
part "$PY" -m pylint --disable=all --enable=R0801 --score=no spectrain
part "$PY" scripts/budgets.py
exit "$failed"
