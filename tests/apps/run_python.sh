#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# Runs a Python test with Debian's own interpreter: run_python.sh FILE [ARGUMENT...]
exec /usr/bin/python3 -B "$@"
