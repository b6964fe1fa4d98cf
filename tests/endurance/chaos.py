# SPDX-License-Identifier: Apache-2.0
"""tools/chaos SECONDS [--seed N] [--programs N] [--calm]

Stock programs and our own data-checking ones, many at once, over one daemon, while programs, engine
and supervisor are stopped, continued and killed, fault rules come and go, and the daemon is started
again. --calm leaves the daemon alive. Everything random comes from the seed.

After each episode of about 12 seconds all is let go: every program must end, and then nothing may
be left: objects in the daemon, descriptors, mapped memory, files in run folder and /dev/shm,
processes. What nobody harmed must have ended well with the right data; what lost its peer or its
device must have ended by itself where its own nature allows. Anything else is a finding: the
daemon's state and all stacks are shown, with the last actions and the seed.
"""

import argparse
import glob
import os
import random
import re
import shutil
import signal
import sys
import tempfile
import time

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, os.path.join(HERE, "..", "apps", "lib"))
sys.path.insert(0, HERE)
import observe
import pairs
import verbena_testing
from verbena_testing import Program, listening

EPISODE_SECONDS = 12
LIMIT = 120.0  # of a program that nobody harmed; the machine may be busy
GRACE = 45.0  # from the last harm to the end of what was harmed
SETTLE_SECONDS = 15
# Of the engine's own memory between two calms; trace rings fill for the first time (6 MiB). A thread
# sanitizer keeps four shadow bytes for each, the address sanitizer keeps what was freed.
ANON_GROWTH_KIB = 12288 * (5 if "TSAN_OPTIONS" in os.environ else
                          32 if "ASAN_OPTIONS" in os.environ else 1)
TICK = 0.02

# What a good program never prints, whatever was done to others.
FINDING = re.compile(
    r"(?i)wrong byte|outside the message|differ from the model|too many|original value|invalid data"
    r"|descriptor leak|double free|corrupted|AddressSanitizer|runtime error:|assertion")


def more(before, now):
    """Is there something now that was not there before? Of counts: is one higher? Before, a
    connection of the observer's own may have been about to close."""
    if isinstance(now, dict):
        return any(count > before.get(kind, 0) for kind, count in now.items())
    return now != before


class Finding(Exception):
    pass


def chaos_program():
    for path in (os.environ.get("VERBENA_CHAOS_PROGRAM"),
                 os.path.join(HERE, "chaos_program"),
                 "bazel-bin/tests/endurance/chaos_program"):
        if path and os.access(path, os.X_OK):
            return os.path.abspath(path)
    raise RuntimeError("no chaos_program: run by Bazel or set VERBENA_CHAOS_PROGRAM")


class Actor:
    """Some programs that belong together."""

    kind = "?"
    stock = False

    def __init__(self):
        self.programs = []
        self.started = time.monotonic()
        self.harmed_at = None
        self.killed = set()  # of programs, by us
        self.lost_device = False
        self.orphaned = False  # engine and supervisor died at once
        self.give_up_at = None  # then what is left is killed without a word
        self.lost_packets = False  # perhaps, for ever

    def lose_packets(self, rng):
        """A fault rule is there; only those over an unreliable transport suffer from it."""

    def harm(self):
        self.harmed_at = time.monotonic()

    def step(self):
        """True once all its programs have ended."""
        return not any(program.running() for program in self.programs)

    def hangs_by_nature(self):
        """True if what still runs may do so: it waits for somebody who will never come."""
        return False

    def check_output(self):
        """A sentence if a run that nobody harmed printed the wrong thing."""
        return None

    def describe(self):
        return "\n".join(program.describe() for program in self.programs)

    def close(self):
        for program in self.programs:
            program.close()


class Stock(Actor):
    stock = True

    def __init__(self, launch, rng):
        super().__init__()
        self.kind = rng.choice(pairs.PROGRAMS)
        self.pair = pairs.Pair(launch, self.kind, rng, LIMIT, large=rng.choice((0.3, 1, 10)))
        self.programs = self.pair.programs

    def step(self):
        # perftest looks at the port first, and a rule may just have taken it down.
        if self.harmed_at is None and any(
                not program.running() and "state is Down" in program.output
                for program in self.programs):
            self.harm()
        return self.pair.step()

    def lose_packets(self, rng):
        if self.pair.unreliable and not self.lost_packets:
            self.lost_packets = True
            self.harm()
            self.give_up_at = time.monotonic() + rng.uniform(3, 15)

    def hangs_by_nature(self):
        # In accept(), or polling its memory for a WRITE; or polling for a peer that was killed, or
        # for a message that was lost.
        # Or in ibv_get_cq_event() when nobody was left to announce the end (docs/DEVIATIONS.md).
        return (listening(self.pair.port) or self.kind == "ib_write_lat" or bool(self.killed) or
                self.lost_packets or
                (self.orphaned and "-e" in self.programs[0].argv))

    def check_output(self):
        if self.pair.port_was_taken():
            return None
        found = self.pair.problems()
        return "; ".join(found) or None


class Own(Actor):

    def __init__(self, launch, rng):
        super().__init__()
        self.kind = rng.choice(("pair", "phoenix", "churn", "kinds"))
        seconds = rng.choice((0.2, 1, 4))
        arguments = [self.kind, rng.getrandbits(32), seconds, rng.choice(("verbena0", "verbena1"))]
        if self.kind in ("pair", "kinds"):
            arguments.append(rng.choice(("verbena0", "verbena1")))
        self.programs = [launch([chaos_program(), "--role", *arguments], LIMIT + GRACE)]

    def check_output(self):
        return own_problem(self.programs)


class Duo(Actor):
    kind = "requester and responder"

    def __init__(self, launch, rng):
        super().__init__()
        self.folder = tempfile.mkdtemp(prefix="vduo.", dir="/tmp")
        shared = [rng.getrandbits(32), rng.choice((1, 5, 30))]
        for role in ("responder", "requester"):
            argv = [chaos_program(), "--role", role, *shared,
                    rng.choice(("verbena0", "verbena1")), self.folder]
            self.programs.append(launch(argv, LIMIT + GRACE))

    def hangs_by_nature(self):
        # Each waits for messages of the other at times, and hears nothing from one that is gone.
        return bool(self.killed) or not all(
            os.path.exists(os.path.join(self.folder, name))
            for name in ("responder", "requester", "ready"))

    def check_output(self):
        return own_problem(self.programs)

    def close(self):
        super().close()
        shutil.rmtree(self.folder, ignore_errors=True)


class Observer(Actor):
    """A command of verbena that looks at the daemon."""

    def __init__(self, daemon, rng):
        super().__init__()
        self.words = rng.choice((
            ["status"], ["counters"], ["list", "qp"], ["list", "mr"], ["list", "cq"],
            ["list", "xrcd"], ["list", "mw"], ["list", "flow"],
            ["fault", "list"], ["capture", "/dev/null", "--for", "0.5"],
            ["capture", "/dev/null", "--count", "200", "--for", "3"], ["doctor"]))
        self.kind = "verbena " + self.words[0]
        self.programs = [Program([daemon.verbena, *self.words], LIMIT,
                                 environment=daemon.environment)]

    def check_output(self):
        status = self.programs[0].wait()
        if status != 0 and self.words[0] != "doctor":
            return f"ends with status {status}"
        return None


def own_problem(programs):
    for program in programs:
        status = program.wait()
        if status != 0:
            return f"{program.argv[2]} ends with status {status}"
        lost = re.search(r"(\d+) lost", program.output)
        if "data right" not in program.output or (lost and lost.group(1) != "0"):
            return f"{program.argv[2]} says no 'data right', or lost its device"
    return None


class Daemon(verbena_testing.Daemon):

    def __init__(self):
        super().__init__(2)
        self.program_environment = self.shell_environment()
        # rdma-core destroys objects of a dead device only for those who ask for it.
        self.program_environment["RDMAV_ALLOW_DISASSOC_DESTROY"] = "1"
        self.supervisor, self.engine_pid = self._known[:2]

    def pids(self):
        return [pid for pid in self._known if os.path.exists(f"/proc/{pid}")]

    def start_again(self):
        """`verbena up`; a killed daemon's name is free when the kernel has let go of it."""
        end = time.monotonic() + 60
        while True:
            status, output = self.command("up", "--nics", 2, limit=60)
            if status == 0:
                self._known = self.processes()
                self.supervisor, self.engine_pid = self._known[:2]
                return
            if time.monotonic() > end or status is None:
                raise Finding(f"verbena up: status {status}\n{output}")
            time.sleep(0.1)

    def launch(self, argv, limit):
        return Program(argv, limit, environment=self.program_environment)


class Chaos:

    def __init__(self, options):
        self.options = options
        self.rng = random.Random(options.seed)
        self.began = time.monotonic()
        self.log = []
        self.counts = {}
        self.actors = []
        self.resume = []  # (time, pid)
        self.daemon_up = False
        self.rules = False
        self.daemon = None
        self.baseline = None  # of this life of the daemon
        self.calm_memory = None
        self.growth_kib = 0

    # ---- notes

    def note(self, text):
        self.log.append(f"{time.monotonic() - self.began:8.2f} {text}")
        del self.log[:-80]

    def count(self, what, number=1):
        self.counts[what] = self.counts.get(what, 0) + number

    # ---- harm

    def stop(self, pid, longest):
        try:
            os.kill(pid, signal.SIGSTOP)
        except ProcessLookupError:
            return
        self.resume.append((time.monotonic() + self.rng.uniform(0.02, longest), pid))

    def resume_due(self, everything=False):
        now = time.monotonic()
        waiting = []
        for when, pid in self.resume:
            if when > now and not everything:
                waiting.append((when, pid))
                continue
            try:
                os.kill(pid, signal.SIGCONT)
            except ProcessLookupError:
                pass
        self.resume = waiting

    def pick_program(self):
        running = [(actor, program) for actor in self.actors for program in actor.programs
                   if program.running()]
        return self.rng.choice(running) if running else (None, None)

    def kill_program(self):
        actor, program = self.pick_program()
        if program is None:
            return
        self.note(f"kill {actor.kind} {program.pid}")
        self.count("programs killed")
        actor.harm()
        actor.killed.add(program)
        if actor.hangs_by_nature():
            actor.give_up_at = time.monotonic() + self.rng.uniform(0, 3)
        program.signal(signal.SIGKILL)

    def stop_program(self):
        actor, program = self.pick_program()
        if program is not None:
            self.note(f"stop {actor.kind} {program.pid}")
            self.count("programs stopped")
            self.stop(program.pid, 1.5)

    def stop_daemon(self):
        pid, name = self.rng.choice(((self.daemon.engine_pid, "engine"),
                                     (self.daemon.supervisor, "supervisor")))
        self.note(f"stop {name}")
        self.count(f"{name} stopped")
        self.stop(pid, 0.5)

    def add_fault(self):
        rng = self.rng
        probability = f"prob={rng.choice((0.002, 0.01, 0.03))} seed={rng.randrange(1000)}"
        where = rng.choice(("", "", " dev=verbena0", " dev=verbena1 dir=rx", " dir=tx dev=verbena1"))
        kind = rng.choice(("", "", " opcode=ack", " opcode=read", " opcode=send", " opcode=write"))
        rule = rng.choice((
            f"drop {probability}", f"duplicate {probability}", f"corrupt {probability}",
            f"reorder {probability} by={rng.randint(1, 4)}", f"mark {probability}",
            f"delay {probability} us={rng.choice((50, 500, 3000))}",
            f"drop nth={rng.randint(1, 20)}", f"drop every=50 count={rng.randint(1, 20)}"))
        rule += where + kind
        if rng.random() < 0.1:
            rule = f"down dev={rng.choice(('verbena0', 'verbena1'))} us={rng.choice((500, 50000))}"
        self.command("fault", "add", rule)
        self.count("fault rules")
        self.rules = True
        for actor in self.actors:
            actor.lose_packets(rng)

    def clear_faults(self):
        self.command("fault", "clear")
        self.rules = False

    def command(self, *words):
        """A command that must succeed while the daemon lives."""
        self.note("verbena " + " ".join(words))
        self.resume_due()
        # It would wait for a daemon that only this process lets go on.
        stopped = {self.daemon.engine_pid, self.daemon.supervisor}
        for when, pid in self.resume:
            if pid in stopped:
                os.kill(pid, signal.SIGCONT)
        status, output = self.daemon.command(*words, limit=30)
        if status != 0:
            raise Finding(f"verbena {' '.join(words)}: status {status}\n{output}")

    def end_daemon(self):
        way = self.rng.choice(("kill engine", "kill supervisor", "kill both", "kill stopped",
                               "terminate", "down"))
        self.note(f"daemon: {way}")
        self.count(f"daemon: {way}")
        self.daemon_up = False
        self.resume_due(everything=way == "down")  # who asks a stopped one waits for long
        for actor in self.actors:
            actor.lost_device = True
            actor.harm()
        engine, supervisor = self.daemon.engine_pid, self.daemon.supervisor
        if way == "down":
            self.daemon.command("down", limit=40)
        elif way == "terminate":
            os.kill(supervisor, signal.SIGTERM)
        else:
            if way == "kill stopped":
                os.kill(supervisor, signal.SIGSTOP)
                self.resume.append((time.monotonic() + 0.3, supervisor))
            victims = {"kill engine": (engine,), "kill supervisor": (supervisor,),
                       "kill both": (supervisor, engine), "kill stopped": (engine,)}[way]
            for actor in self.actors:
                actor.orphaned |= way == "kill both"
            for pid in victims:
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    pass

    def start_daemon(self):
        self.resume_due(everything=True)
        self.daemon.start_again()
        self.daemon_up = True
        self.rules = False
        self.baseline = self.calm_memory = None
        self.note("daemon: up")
        self.count("daemon starts")
        for actor in self.actors:  # They belong to the one before.
            actor.lost_device = True

    # ---- programs

    def start_actor(self):
        if self.rng.random() < 0.06 and self.daemon_up:
            actor = Observer(self.daemon, self.rng)
        else:
            make = self.rng.choices((Stock, Own, Duo), weights=(5, 4, 2))[0]
            actor = make(self.daemon.launch, self.rng)
        self.note(f"start {actor.kind} {[program.pid for program in actor.programs]}")
        if not self.daemon_up:
            actor.lost_device = True
            actor.harm()
        elif self.rules:
            actor.lose_packets(self.rng)
        self.actors.append(actor)
        self.count("programs")

    def tend(self):
        """Judges what has ended, and what should have."""
        for actor in list(self.actors):
            if actor.step():
                self.judge(actor)
                self.actors.remove(actor)
                actor.close()
                continue
            now = time.monotonic()
            if actor.give_up_at is not None and now > actor.give_up_at:
                self.give_up(actor)
            elif actor.harmed_at is None:
                if now - actor.started > LIMIT:
                    raise Finding(f"{actor.kind} is not done after {LIMIT:.0f} s, harmed by nobody")
            elif now - actor.harmed_at > GRACE:
                if not actor.hangs_by_nature():
                    raise Finding(f"{actor.kind} hangs {GRACE:.0f} s after it was harmed")
                self.give_up(actor)

    def give_up(self, actor):
        self.count("waiting for ever by nature")
        for program in actor.programs:
            if program.running():
                actor.killed.add(program)
                program.signal(signal.SIGKILL)
        actor.harm()
        actor.give_up_at = None

    def judge(self, actor):
        for program in actor.programs:
            status = program.wait()
            words = FINDING.search(program.output)
            if words:
                raise Finding(f"{actor.kind} prints '{words.group(0)}'")
            if program in actor.killed:
                continue
            # perftest writes into the TCP connection to a peer that may be dead.
            broken_pipe = actor.stock and bool(actor.killed) and status == 128 + signal.SIGPIPE
            # With -c XRC, when a QP could not be made, it destroys the SRQ that it has not made yet.
            no_srq = (actor.stock and actor.lost_device and status == 128 + signal.SIGSEGV and
                      "XRC" in program.argv and "Failed to create QP" in program.output)
            if status is not None and status >= 128 and not broken_pipe and not no_srq:
                raise Finding(f"{actor.kind} {program.pid} was ended by signal {status - 128}")
            if not actor.stock and status == 2 and not actor.killed:
                raise Finding(f"{actor.kind}: a finding of its own")
            if observe.group(program.pid):
                raise Finding(f"{actor.kind} {program.pid} has left processes behind")
        if actor.harmed_at is not None or actor.lost_device:
            self.count("ended after harm")
            return
        problem = actor.check_output()
        if problem:
            raise Finding(f"{actor.kind}, harmed by nobody: {problem}")
        self.count("ended well")

    # ---- episodes

    def episode(self, violent, seconds):
        end = time.monotonic() + seconds
        deadly = time.monotonic() + self.rng.uniform(0.2, 0.8) * seconds if violent else None
        back = None
        actions = ((self.kill_program, 5), (self.stop_program, 4), (self.stop_daemon, 1),
                   (self.add_fault, 2), (self.clear_faults, 1))
        next_action = time.monotonic() + 1
        while time.monotonic() < end:
            self.resume_due()
            while len(self.actors) < self.options.programs:
                self.start_actor()
            self.tend()
            now = time.monotonic()
            if deadly is not None and now > deadly:
                self.end_daemon()
                deadly = None
                back = now + self.rng.choice((0, 0.1, 1.0))
            if back is not None and now > back:
                self.start_daemon()
                back = None
            if now > next_action:
                next_action = now + self.rng.expovariate(3)
                action = self.rng.choices([each[0] for each in actions],
                                          [each[1] for each in actions])[0]
                if self.daemon_up or action in (self.kill_program, self.stop_program):
                    action()
            time.sleep(TICK)
        if not self.daemon_up:
            self.start_daemon()

    def calm(self):
        """Lets all end; nothing may be left then."""
        self.resume_due(everything=True)
        self.clear_faults()
        while self.actors:
            self.tend()
            time.sleep(TICK)
        self.check_nothing_left()
        self.check_works()
        self.count("calms")

    def holdings(self):
        """What must be the same at each calm of one life of the daemon."""
        found = {"objects": {kind: n for kind, n in observe.objects(self.daemon).items() if n}}
        for name, pid in (("supervisor", self.daemon.supervisor),
                          ("engine", self.daemon.engine_pid)):
            found[name + " descriptors"] = observe.descriptors(pid)
            found[name + " mappings"] = observe.mapped_memfds(pid)
            found[name + " threads"] = len(glob.glob(f"/proc/{pid}/task/*"))
        found["run folder"] = sorted(
            name for name in os.listdir(os.path.join(self.daemon.folder, "verbena"))
            # One file, bounded, that is there once something has failed: not left behind.
            if not name.startswith(".") and not name.endswith(".failures"))
        found["/dev/shm"] = sorted(observe.shared_files())
        found["daemons"] = sorted(observe.daemons(self.daemon.folder))
        return found

    def check_nothing_left(self):
        end = time.monotonic() + SETTLE_SECONDS
        while True:
            now = self.holdings()
            wrong = {}
            if now["objects"]:
                wrong["objects"] = now["objects"]
            if now["daemons"] != sorted({self.daemon.supervisor, self.daemon.engine_pid}):
                wrong["daemons"] = now["daemons"]
            if self.baseline is not None:
                wrong.update({name: (self.baseline[name], value) for name, value in now.items()
                              if more(self.baseline[name], value)})
            if not wrong:
                break
            if time.monotonic() > end:
                raise Finding("left when all programs have ended: " + "; ".join(
                    f"{name}: {value}" for name, value in wrong.items()))
            time.sleep(0.1)
        self.baseline = now
        memory = observe.anonymous_kib(self.daemon.engine_pid)
        if self.calm_memory is not None:
            self.growth_kib = max(self.growth_kib, memory - self.calm_memory)
            if memory - self.calm_memory > ANON_GROWTH_KIB:
                raise Finding(f"engine memory {self.calm_memory} KiB -> {memory} KiB between calms")
        self.calm_memory = max(memory, self.calm_memory or 0)

    def check_works(self):
        pair = pairs.Pair(self.daemon.launch, pairs.PINGPONG, self.rng, 60.0)
        try:
            problems = pair.problems() if pair.wait() else ["not done after 60 s"]
            if problems and not pair.port_was_taken():
                raise Finding(f"after the storm: {'; '.join(problems)}\n{pair.describe()}")
        finally:
            pair.close()

    # ---- all

    def run(self):
        shm_before = observe.shared_files()
        problem = None
        with Daemon() as self.daemon:
            self.daemon_up = True
            try:
                self.storm()
            except Finding as finding:
                problem = str(finding)
                programs = [program for actor in self.actors for program in actor.programs]
                print(f"\nFINDING: {problem}\nseed {self.options.seed}; the last actions:\n" +
                      "\n".join(self.log) + "\n" +
                      "\n".join(actor.describe() for actor in self.actors) + "\n" +
                      observe.state(self.daemon, [p for p in programs if p.running()]),
                      flush=True)
            finally:
                self.resume_due(everything=True)
                for actor in self.actors:
                    actor.close()
            if problem is None:
                problem = self.end()
        if problem is None and observe.shared_files() != shm_before:
            problem = f"/dev/shm: {shm_before} -> {observe.shared_files()}"
        self.report(problem)
        return 1 if problem else 0

    def storm(self):
        end = self.began + self.options.seconds
        self.check_nothing_left()
        self.check_works()
        while time.monotonic() < end:
            violent = not self.options.calm and self.rng.random() < 0.6
            seconds = min(EPISODE_SECONDS, max(2, end - time.monotonic()))
            self.episode(violent, seconds)
            self.calm()

    def end(self):
        """`verbena down` leaves no process and no socket."""
        status, output = self.daemon.command("down", limit=40)
        left = observe.daemons(self.daemon.folder)
        files = [name for name in os.listdir(os.path.join(self.daemon.folder, "verbena"))
                 if re.fullmatch(r"[^.].*\.(sock|tree)", name)]
        if status != 0 or left or files:
            return f"verbena down: status {status}, processes {left}, files {files}\n{output}"
        return None

    def report(self, problem):
        print(f"\n{time.monotonic() - self.began:.0f} s, seed {self.options.seed}")
        for what, number in sorted(self.counts.items()):
            print(f"  {what:28} {number:6}")
        print(f"  engine memory between calms  +{self.growth_kib} KiB at most")
        print(f"FINDING: {problem}" if problem else "no finding", flush=True)


def main():
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    parser = argparse.ArgumentParser(prog="tools/chaos", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("seconds", type=float)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--programs", type=int, default=6)
    parser.add_argument("--calm", action="store_true")
    return Chaos(parser.parse_args()).run()


if __name__ == "__main__":
    sys.exit(main())
