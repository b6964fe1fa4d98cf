# SPDX-License-Identifier: Apache-2.0
"""part_cost.py ROUNDS WITH WITHOUT_TRACE WITHOUT_FAULTS: what parts of the engine cost.

Runs three builds of engine_bench in turns, each round in another order, and prints the medians and
what the trace and the fault stage (without a rule) cost: the median over the rounds of the ratio
within a round, and the quartiles of that ratio, which are the error of the figure.
"""

import random
import statistics
import subprocess
import sys

BUILDS = ("everything", "no trace", "no fault stage")
MESSAGES = ("SEND", "WRITE")
# What is required, in percent of the message rate, which ib_write_bw measures: of WRITEs.
TARGETS = {"no trace": 5.0, "no fault stage": 1.0}


def main():
    rounds, programs = int(sys.argv[1]), sys.argv[2:]
    assert len(programs) == len(BUILDS), __doc__
    took = {(name, message): [] for name in BUILDS for message in MESSAGES}
    for _ in range(rounds):
        for name, program in random.sample(list(zip(BUILDS, programs)), len(BUILDS)):
            output = subprocess.run([program], capture_output=True, text=True, timeout=120, check=True)
            for message, value in zip(MESSAGES, output.stdout.split(), strict=True):
                took[name, message].append(float(value))
    for (name, message), values in took.items():
        print(f"{message:<6} {name:<15} {statistics.median(values):7.1f} ns per message")
    for message in MESSAGES:
        for name, target in TARGETS.items():
            costs = [100 * (whole / less - 1)
                     for whole, less in zip(took["everything", message], took[name, message])]
            low, middle, high = statistics.quantiles(costs, n=4)
            verdict = f"target < {target:g} %   {'met' if middle < target else 'MISSED'}"
            print(f"{message:<6} {name.removeprefix('no '):<15} {middle:+6.2f} %   quartiles "
                  f"{low:+.2f} to {high:+.2f}   {verdict if message == 'WRITE' else ''}".rstrip())


main()
