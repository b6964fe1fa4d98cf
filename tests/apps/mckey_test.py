# SPDX-License-Identifier: Apache-2.0
"""Multicast of stock programs: mckey, several receivers on two NICs."""

import os
import re
import sys
import time

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "lib"))
import verbena_testing
from verbena_testing import AppTestCase, Daemon

FIRST, SECOND = "127.88.0.1", "127.88.0.2"
FIRST_V6, SECOND_V6 = "fd00:88::1", "fd00:88::2"
MESSAGES, SIZE = 10, 400


class Mckey(AppTestCase):

    @classmethod
    def setUpClass(cls):
        cls.daemon = Daemon(2, ["--address", f"verbena0={FIRST}/16",
                                "--address", f"verbena0={FIRST_V6}/64",
                                "--address", f"verbena1={SECOND}/16",
                                "--address", f"verbena1={SECOND_V6}/64"])

    def start_receiver(self, group, address, *options):
        receiver = self.daemon.program("mckey", "-m", group, "-b", address, "-C", MESSAGES, "-S",
                                       SIZE, *options, limit=40)
        if not receiver.wait_for("joined dgid"):
            receiver.kill()
            receiver.wait()
            text = receiver.describe()
            receiver.close()
            self.fail(text + self.daemon.dump())
        return receiver

    def send(self, group, address, *options):
        return self.daemon.program("mckey", "-s", "-m", group, "-b", address, "-C", MESSAGES, "-S",
                                   SIZE, *options, limit=40)

    def multicast(self, device, name):
        return self.daemon.counters()[device][f"multicast_{name}_packets"]

    def check(self, group, first, second, dgid):
        before = {name: self.multicast(name[0], name[1])
                  for name in (("verbena0", "xmit"), ("verbena0", "rcv"), ("verbena1", "rcv"))}
        receivers = [self.start_receiver(group, address) for address in (first, first, second)]
        outputs = self.finish(*receivers, self.send(group, first))
        for output in outputs:
            self.assertIn("test complete", output)
            self.assertIn("return status 0", output)
            self.assertRegex(output, rf"joined dgid: {re.escape(dgid)} ")
        for (device, name), count in before.items():
            self.assertEqual(self.multicast(device, name) - count, MESSAGES, (device, name))
        self.assert_nothing_left()

    def assert_nothing_left(self):
        end = time.monotonic() + 10
        while self.daemon.json("list", "cm_id") or self.daemon.json("list", "qp"):
            self.assertLess(time.monotonic(), end)
            time.sleep(0.05)

    def test_several_receivers_on_two_nics_over_ipv4(self):
        self.check("239.1.2.3", FIRST, SECOND, "::ffff:239.1.2.3")

    def test_several_receivers_on_two_nics_over_ipv6(self):
        self.check("ff15::4791", FIRST_V6, SECOND_V6, "ff15::4791")

    def test_several_connections_in_one_process(self):
        receiver = self.start_receiver("239.1.2.4", FIRST, "-c", 3)
        self.finish(receiver, self.send("239.1.2.4", SECOND))

    def test_a_sender_that_joins_to_send_only(self):
        receiver = self.start_receiver("239.1.2.5", FIRST)
        self.finish(receiver, self.send("239.1.2.5", SECOND, "-o"))

    def test_a_sender_without_loopback(self):
        receiver = self.start_receiver("239.1.2.8", FIRST)
        self.finish(receiver, self.send("239.1.2.8", FIRST, "-l"))

    def test_another_group_hears_nothing(self):
        other = self.start_receiver("239.1.2.6", FIRST)
        self.finish(self.start_receiver("239.1.2.7", FIRST), self.send("239.1.2.7", FIRST))
        self.assertTrue(other.running(), other.describe())
        other.close()

    # Linux has no AF_IB on RoCE devices.
    def test_an_address_of_infiniband_is_refused_without_a_hang(self):
        status, output = self.daemon.run("mckey", "-M", "ff12:401b:ffff::1", "-b", FIRST, limit=20)
        self.assertNotIn(status, (0, None), output)


if __name__ == "__main__":
    verbena_testing.main()
