#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# Checks the edits against the tree in which README.md really lies (the sandbox holds links).
set -euo pipefail
export VERBENA_TREE
VERBENA_TREE=$(dirname -- "$(readlink -f README.md)")
exec timeout 60 /usr/bin/python3 "$VERBENA_TREE/tools/mutants" --check
