#!/usr/bin/env bash
# Warm start, training through verl and vLLM, closing table; arguments go to recipes.cpu_search.train (--help).
set -euo pipefail
cd "$(dirname "$0")/../.."
exec python -m recipes.cpu_search.train "$@"
