#!/usr/bin/env bash
# Warm starts, training through verl and vLLM, closing table; arguments go to recipes.cpu_delegate.train (--help).
set -euo pipefail
cd "$(dirname "$0")/../.."
exec python -m recipes.cpu_delegate.train "$@"
