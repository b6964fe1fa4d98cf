# SPDX-License-Identifier: Apache-2.0
"""tools/soak N [--perftest M] [--apps] [--jobs J] [--seed S] [--limit SECONDS] [--only PROGRAM]...

Runs N pairs of ibv_rc_pingpong and M pairs (default N / 5) of each RC program of perftest over one
daemon, J at a time, with options that vary from round to round. Each pair must end well within its
time limit, and nothing of it may stay in the daemon. The first failure stops everything: what the
programs printed, the daemon's state and the stacks of all its threads are shown.

--apps: N rounds of each application instead: those of rdma_cm, rsockets, qperf, fio, UCX, libfabric
and Open MPI (tests/endurance/applications.py).
"""

import argparse
import itertools
import os
import random
import signal
import statistics
import sys
import threading
import time

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, os.path.join(HERE, "..", "apps", "lib"))
sys.path.insert(0, HERE)
import applications
import observe
import pairs
import verbena_testing

SETTLE_SECONDS = 10
PROGRESS_SECONDS = 30


class Daemon(verbena_testing.Daemon):
    def pids(self):
        return self._known


class Soak:

    def __init__(self, options):
        self.options = options
        self.lock = threading.Lock()
        self.work = self.make_work()
        self.times = self.no_times()
        self.ports_taken = 0
        self.too_early = 0
        self.failure = None
        self.started = time.monotonic()
        self.reported = self.started

    @staticmethod
    def no_times():
        return {program: [] for program in pairs.PROGRAMS + applications.PROGRAMS}

    def make_work(self):
        if self.options.apps:
            return self.mixed({program: self.options.rounds for program in applications.PROGRAMS})
        rounds = {program: self.options.perftest for program in pairs.PERFTEST}
        rounds[pairs.PINGPONG] = self.options.rounds
        return self.mixed(rounds)

    def mixed(self, rounds):
        if self.options.only:
            rounds = {name: count for name, count in rounds.items() if name in self.options.only}
        # Evenly mixed, the same for the same seed.
        work = sorted((((i + 0.5) / count, program, i)
                       for program, count in rounds.items() for i in range(count)), reverse=True)
        return [(program, i) for _, program, i in work]

    def next(self):
        with self.lock:
            return self.work.pop() if self.work and self.failure is None else None

    def run_pair(self, daemon, program, index):
        for tries in itertools.count(1):
            rng = random.Random(f"{self.options.seed}/{program}/{index}")
            if program in applications.PROGRAMS:
                pair = applications.Application(
                    lambda argv, limit, environment: daemon.program(*argv, limit=limit,
                                                                    environment=environment),
                    lambda: daemon.json("list", "cm_id"), program, rng, self.options.limit)
            else:
                pair = pairs.Pair(lambda argv, limit: daemon.program(*argv, limit=limit), program,
                                  rng, self.options.limit)
            try:
                ended = pair.wait()
                if tries < 4 and pair.was_too_early():
                    with self.lock:
                        self.too_early += 1
                    continue
                problems = pair.problems() if ended else [
                    f"not done after {self.options.limit:.0f} s"]
                if problems and ended and pair.port_was_taken():
                    with self.lock:
                        self.ports_taken += 1
                    continue
                if problems:
                    self.fail(daemon, pair, f"{program} round {index}: {'; '.join(problems)}")
                with self.lock:
                    self.times[program].append(time.monotonic() - pair.start)
                return
            finally:
                pair.close()

    def fail(self, daemon, pair, sentence):
        with self.lock:
            if self.failure is not None:
                return
            self.failure = sentence
        # While what hangs still hangs.
        text = observe.state(daemon, pair.programs)
        print(f"\nFAILED: {sentence}\n{pair.describe()}\n{text}", flush=True)

    def worker(self, daemon):
        while True:
            job = self.next()
            if job is None:
                return
            try:
                self.run_pair(daemon, *job)
            except Exception as error:  # pylint: disable=broad-except
                with self.lock:
                    self.failure = self.failure or f"{job[0]} round {job[1]}: {error!r}"
                raise

    def progress(self):
        now = time.monotonic()
        if now - self.reported < PROGRESS_SECONDS:
            return
        self.reported = now
        with self.lock:
            done = sum(len(each) for each in self.times.values())
            print(f"{now - self.started:6.0f} s  {done} done, {len(self.work)} to go", flush=True)

    def settled(self, daemon, before):
        """What the daemon still holds when all programs have ended, or None."""
        end = time.monotonic() + SETTLE_SECONDS
        while True:
            held = {name: count for name, count in observe.objects(daemon).items() if count}
            grown = []
            for pid, (descriptors, _) in before.items():
                now = observe.descriptors(pid)
                grown += [f"{kind}: {descriptors.get(kind, 0)} -> {count} in process {pid}"
                          for kind, count in now.items() if count > descriptors.get(kind, 0)]
            if not held and not grown:
                return None
            if time.monotonic() > end:
                return f"objects left: {held}; descriptors left: {grown}"
            time.sleep(0.1)

    def run(self):
        with Daemon(2) as daemon:
            # Pools and caches that grow once are not leaks: the first round fills them.
            for program in sorted({name for name, _ in self.work}) if self.options.apps else (
                    pairs.PINGPONG, "ib_write_bw"):
                self.run_pair(daemon, program, -1)
            self.times = self.no_times()
            engine = daemon.engine()
            before = {pid: (observe.descriptors(pid), observe.memory_kib(pid))
                      for pid in daemon.pids()}
            threads = [threading.Thread(target=self.worker, args=(daemon,), daemon=True)
                       for _ in range(self.options.jobs)]
            for thread in threads:
                thread.start()
            while any(thread.is_alive() for thread in threads):
                time.sleep(0.2)
                self.progress()
            if self.failure is None:
                self.failure = self.settled(daemon, before)
                if self.failure:
                    print(f"\nFAILED: {self.failure}\n{observe.state(daemon)}")
            memory = (before[engine][1], observe.memory_kib(engine))
        self.report(memory)
        return 1 if self.failure else 0

    def report(self, memory):
        print(f"\n{'program':16} {'rounds':>7} {'median s':>9} {'longest s':>10}")
        for program, times in self.times.items():
            if times:
                print(f"{program:16} {len(times):7} {statistics.median(times):9.2f} "
                      f"{max(times):10.2f}")
        print(f"{time.monotonic() - self.started:.0f} s, seed {self.options.seed}, engine memory "
              f"{memory[0]} KiB -> {memory[1]} KiB, TCP ports tried again: {self.ports_taken}, "
              f"clients too early for their server: {self.too_early}")
        total = sum(len(times) for times in self.times.values())
        print(f"FAILED: {self.failure}" if self.failure else f"{total} rounds, no failure")


def main():
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # Daemon and programs must be ended.
    parser = argparse.ArgumentParser(prog="tools/soak", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rounds", type=int)
    parser.add_argument("--perftest", type=int)
    parser.add_argument("--apps", action="store_true")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--limit", type=float, default=60.0)
    parser.add_argument("--only", action="append", choices=pairs.PROGRAMS + applications.PROGRAMS)
    options = parser.parse_args()
    if options.perftest is None:
        options.perftest = options.rounds // 5
    options.apps = options.apps or any(name in applications.PROGRAMS for name in options.only or ())
    return Soak(options).run()


if __name__ == "__main__":
    sys.exit(main())
