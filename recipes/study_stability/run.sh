#!/usr/bin/env bash
# The whole study; arguments go to recipes.study_stability.study (--help). `confirm` as the first one: through real verl.
set -euo pipefail
cd "$(dirname "$0")/../.."
command=study
if [ "${1:-}" = confirm ]; then
    command=confirm
    shift
fi
exec python -m "recipes.study_stability.$command" "$@"
