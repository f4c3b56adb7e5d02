#!/usr/bin/env bash
# scripts/quickstart.sh [--torch-index URL] [--venv DIR] [options of `spectrain quickstart`]
#
# Installs spectrain and a small model into a virtual environment, then trains, measures and shows a first
# head. A second call installs nothing.
#
#   --torch-index URL  package index to take torch from, such as PyTorch's own for wheels without CUDA
#   --venv DIR         virtual environment, made if absent (default .venv, relative to the repository)
#   --help             this text; `spectrain quickstart --help` lists the other options

set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/setup_env.sh
parse_options "$@"
setup_env gguf,plots
exec "$VENV/bin/spectrain" quickstart ${REST[@]+"${REST[@]}"}
