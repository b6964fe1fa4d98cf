# SPDX-License-Identifier: Apache-2.0
"""MPI over UCX over the simulated NIC: mpi/mpi_check.cc with Open MPI, and with MPICH if
VERBENA_TEST_FULL is set (its packages are large).

Shared memory is left out of UCX_TLS, so that every message goes over the device.
"""

import os
import subprocess
import sys
import tempfile

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "lib"))
import verbena_testing
from verbena_testing import FULL, AppTestCase

SOURCE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "mpi", "mpi_check.cc")
SECTIONS = ("p2p", "wildcards", "collectives", "datatypes", "onesided")
DEVICE = "verbena0:1"


class Mpi(AppTestCase):

    folder = None

    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        cls.folder = tempfile.TemporaryDirectory(prefix="vmpi.", dir="/tmp")

    @classmethod
    def tearDownClass(cls):
        cls.folder.cleanup()
        super().tearDownClass()

    def program(self, compiler):
        path = os.path.join(self.folder.name, compiler)
        if not os.path.exists(path):
            subprocess.run([compiler, "-std=c++20", "-O1", "-w", "-o", path, SOURCE], check=True,
                           timeout=120)
        return path

    def check(self, *argv):
        before = self.daemon.counters()["verbena0"]["port_xmit_packets"]
        status, output = self.daemon.run(*argv, limit=170, folder=self.folder.name)
        self.assertEqual(status, 0, output)
        for section in SECTIONS:
            self.assertIn(f"{section}: ok", output)
        self.assertGreater(self.daemon.counters()["verbena0"]["port_xmit_packets"] - before, 2000)

    def open_mpi(self, ranks, transports):
        self.check("mpirun.openmpi", "-n", ranks, "--allow-run-as-root", "--oversubscribe",
                   "--mca", "pml", "ucx", "--mca", "osc", "ucx",
                   "--mca", "btl", "^vader,tcp,openib,uct",
                   "-x", f"UCX_NET_DEVICES={DEVICE}", "-x", f"UCX_TLS={transports}",
                   self.program("mpicxx.openmpi"))

    # MPICH 4.0 cannot unpack a fragment that ends inside an element (it fails over TCP, too, with
    # UCX_TCP_TX_SEG_SIZE=5003): those of 8201 bytes carry a multiple of 8.
    def mpich(self, ranks, transports):
        self.check("mpiexec.mpich", "-n", ranks, "-env", "UCX_NET_DEVICES", DEVICE,
                   "-env", "UCX_RC_VERBS_SEG_SIZE", 8201, "-env", "UCX_WARN_UNUSED_ENV_VARS", "n",
                   "-env", "UCX_TLS", transports, self.program("mpicxx.mpich"))

    def test_open_mpi(self):
        self.open_mpi(2, "rc,self")

    def test_every_number_of_ranks_with_open_mpi(self):
        if not FULL:
            self.skipTest("VERBENA_TEST_FULL is not set")
        for ranks in (2, 3, 4):
            for transports in ("rc,self", "ud_verbs,self"):
                with self.subTest(ranks=ranks, transports=transports):
                    self.open_mpi(ranks, transports)

    def test_every_number_of_ranks_with_mpich(self):
        if not FULL:
            self.skipTest("VERBENA_TEST_FULL is not set")
        for ranks in (2, 3, 4):
            for transports in ("rc,self", "ud_verbs,self"):
                with self.subTest(ranks=ranks, transports=transports):
                    self.mpich(ranks, transports)


if __name__ == "__main__":
    verbena_testing.main()
