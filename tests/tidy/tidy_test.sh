#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# Runs tidy_test.py on the tree in which README.md really lies (the sandbox holds links).
set -euo pipefail
export VERBENA_TREE
VERBENA_TREE=$(dirname -- "$(readlink -f README.md)")
exec timeout 240 /usr/bin/python3 tests/tidy/tidy_test.py
