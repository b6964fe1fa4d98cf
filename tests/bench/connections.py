# SPDX-License-Identifier: Apache-2.0
"""Set-up of connections: cmtime of librdmacm beside TCP on the loopback interface.

Rate: COUNT connections that are set up together; latency: one after the other. cmtime makes an id,
resolves address and route, makes a QP and connects; TCP makes a socket and connects. Both close
afterwards, outside of what is measured.
"""

import re
import select
import socket
import statistics
import threading
import time

from verbena_testing import ADDRESS

COUNT = 1000
SINGLE = 20
STEPS = ("create id", "resolve addr", "resolve route", "create qp", "connect", "disconnect",
         "destroy")
SET_UP = STEPS[:5]
PORT = 7471


class Failed(Exception):
    pass


def _cmtime(daemon, port, count, limit):
    """{step: milliseconds} for all connections."""
    status, output = daemon.run("cmtime", "-s", ADDRESS, "-p", port, "-c", count, limit=limit)
    found = {step: float(total) for step, total in
             re.findall(r"(?m)^([a-z]+(?: [a-z]+)?) *: +([0-9.]+)", output)}
    if status != 0 or not set(STEPS) <= set(found):
        raise Failed(f"cmtime: status {status}\n{output}")
    return found


def rdma(daemon, count=COUNT, single=SINGLE, limit=120):
    """{"rate": per second, "latency": us, "steps": {step: us for each of `count`}}."""
    server = daemon.program("cmtime", "-p", PORT, limit=3 * limit)
    try:
        end = time.monotonic() + 20
        while not any(item["state"] == "listen" for item in daemon.json("list", "cm_id")):
            if not server.running() or time.monotonic() > end:
                raise Failed(server.describe())
            time.sleep(0.02)
        many = _cmtime(daemon, PORT, count, limit)
        one = [_cmtime(daemon, PORT, 1, limit) for _ in range(single)]
    finally:
        server.close()
    return {"rate": count / sum(many[step] for step in SET_UP) * 1000,
            "latency": statistics.median(sum(each[step] for step in SET_UP) for each in one) * 1000,
            "steps": {step: many[step] * 1000 / count for step in STEPS}}


def tcp(count=COUNT, single=SINGLE * 10):
    """{"rate": per second, "latency": us}."""
    listener = socket.create_server(("127.0.0.1", 0), backlog=count)
    address = listener.getsockname()
    taken = []

    def accept():
        for _ in range(count + single):
            taken.append(listener.accept()[0])

    server = threading.Thread(target=accept, daemon=True)
    server.start()
    start = time.monotonic()
    waiting = select.poll()
    clients = {}
    for _ in range(count):
        client = socket.socket()
        client.setblocking(False)
        client.connect_ex(address)
        clients[client.fileno()] = client
        waiting.register(client.fileno(), select.POLLOUT)
    left = set(clients)
    while left:
        for fd, _ in waiting.poll(20000) or ():
            waiting.unregister(fd)
            left.discard(fd)
    while len(taken) < count:
        time.sleep(0)
    rate = count / (time.monotonic() - start)
    times = []
    for _ in range(single):
        start = time.monotonic()
        client = socket.socket()
        client.connect(address)
        times.append(time.monotonic() - start)
        clients[-len(times)] = client
    server.join(20)
    for each in [*clients.values(), *taken, listener]:
        each.close()
    return {"rate": rate, "latency": statistics.median(times) * 1e6}


def compare(daemon, rounds, quick=False):
    """Rows for compare.py's table, and the steps of cmtime as text."""
    count, single = (100, 3) if quick else (COUNT, SINGLE)
    ours, theirs = [], []
    for _ in range(rounds):
        ours.append(rdma(daemon, count, single))
        theirs.append(tcp(count, single * 10))
    rows = []
    for figure, key, unit, factor in (("conn_rate", "rate", "1000/s", 1e-3),
                                      ("conn_latency", "latency", "us", 1)):
        mine = statistics.median(each[key] for each in ours) * factor
        other = statistics.median(each[key] for each in theirs) * factor
        rows.append({"figure": figure, "unit": unit, "verbena": mine, "kernel_tcp": other,
                     "ratio": mine / other,
                     "samples": {"verbena": [each[key] for each in ours],
                                 "kernel_tcp": [each[key] for each in theirs]}})
    steps = {step: statistics.median(each["steps"][step] for each in ours) for step in STEPS}
    lines = [f"{count} connections together, one after the other; steps: us for each of {count}",
             f"{'figure':<14} {'unit':<7} {'verbena':>9} {'tcp':>9} {'/tcp':>8}"]
    lines += [f"{row['figure']:<14} {row['unit']:<7} {row['verbena']:>9.3g} "
              f"{row['kernel_tcp']:>9.3g} {row['ratio']:>8.3g}" for row in rows]
    lines += [f"  {step:<12} us      {steps[step]:>9.3g}" for step in STEPS]
    return rows, steps, "\n".join(lines)
