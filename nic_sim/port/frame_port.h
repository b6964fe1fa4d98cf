// SPDX-License-Identifier: Apache-2.0
//
// Something that takes and gives Ethernet frames: a DPDK port, or a test.
//
// Thread: under the fabric's lock.
#pragma once

#include <rte_mbuf.h>

#include <cstddef>
#include <cstdint>
#include <span>

namespace verbena::nic {

class FramePort {
 public:
  virtual ~FramePort() = default;

  // Up to out.size() frames, each with FrameMeta's room in its private area; the
  // caller frees them. They may be of any size and in several segments.
  virtual size_t Receive(std::span<rte_mbuf*> out) = 0;
  // Takes the first ones over, as many as there is room for; gives their number.
  virtual size_t Send(std::span<rte_mbuf*> frames) = 0;
  // Bytes behind the Ethernet header, and whether the link is up, as of the last
  // Refresh.
  virtual uint32_t mtu() const = 0;
  virtual bool up() const = 0;
  // Asks the netdev; from control calls only.
  virtual void Refresh() = 0;
  // Readable when frames wait; -1: none.
  virtual int wake_fd() const = 0;
};

}  // namespace verbena::nic
