#!/usr/bin/env bash
# Warm starts, two training jobs that meet in a store, a check of the store; arguments go to recipes.cpu_pair.train (--help).
set -euo pipefail
cd "$(dirname "$0")/../.."
exec python -m recipes.cpu_pair.train "$@"
