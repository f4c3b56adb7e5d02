#!/usr/bin/env bash
# Heads in a real engine, the part of scripts/engine.sh that says whether a head is served as it was measured: vLLM on the CPU serves the
# small model with an EAGLE-3 head (flat, and of speculators) and a Medusa head, chains of 3 and of 5. The text must stay plain decoding's,
# and the drafts accepted by position, domain by domain, those of `spectrain evaluate --engine vllm` here, within 2 points.
#
# usage: scripts/serve_check.sh [options of scripts/engine.sh]

set -euo pipefail
exec "$(dirname "$0")/engine.sh" "$@" -k test_served_head -s
