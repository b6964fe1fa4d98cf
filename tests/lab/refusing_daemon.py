# SPDX-License-Identifier: Apache-2.0
"""A system-wide daemon as a plain user meets it (docs/CONTROL.md): their own objects, nothing else."""

import json
import os
import socket
import struct
import threading

MAGIC = 0x4E425256
CONTROL = 2
REFUSAL = {"error": "only the daemon's user, root and members of its group may do that",
           "errno": "EPERM"}
STATUS = {"name": "t", "pid": 1, "system": True, "mode": "thread-per-cpu", "threads": 1,
          "clients": 1, "nics": [
              {"device": f"verbena{i}", "host": f"host{i}", "mac": "02:00:00:00:00:01",
               "ipv4": f"127.88.0.{i + 1}", "gids": [], "state": "ACTIVE", "port": None,
               "active_mtu": 1024} for i in range(2)]}


class RefusingDaemon:
    """Serves FOLDER/verbena/NAME.sock until `close`. `asked` counts requests by op."""

    def __init__(self, path):
        self.asked = {}
        os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
        self._listen = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listen.bind(path)
        os.chmod(path, 0o600)
        self._listen.listen()
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self):
        self._listen.shutdown(socket.SHUT_RDWR)
        self._listen.close()

    def _accept(self):
        while True:
            try:
                connection, _ = self._listen.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection):
        with connection:
            if connection.recv(64) != struct.pack("<II", MAGIC, CONTROL):
                return
            while True:
                text = connection.recv(65536)
                if not text:
                    return
                answer = self._answer(json.loads(text))
                connection.send(b"L" + json.dumps(answer).encode())

    def _answer(self, request):
        op = request["op"]
        self.asked[op] = self.asked.get(op, 0) + 1
        if op == "version":
            return {"version": "test", "abi": [1, 1], "pid": os.getpid()}
        if op == "status":
            return {**STATUS, "pid": os.getpid()}
        if op == "list":
            return {"items": []}
        return REFUSAL
