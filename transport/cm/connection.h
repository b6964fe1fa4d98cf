// SPDX-License-Identifier: Apache-2.0
//
// What CmProtocol keeps of one connection beyond what others may read.
#pragma once

#include "transport/cm/protocol.h"

namespace verbena::transport {

struct CmProtocol::Connection : CmConnection {
  uint64_t tid = 0;  // of the exchange that the next answer belongs to
  Gid sidr_source;   // of a SIDR_REQ received
  uint32_t sidr_request = 0;

  // The message that is repeated until it is answered.
  bool repeating = false;
  MadPacket message;
  Duration timeout;  // until a message that waits for an answer is repeated
  uint8_t max_retries = 0;
  uint8_t retries_left = 0;
  Duration interval;  // of the message under way; an MRA makes it longer

  uint8_t service_timeout = 0;  // of MRAs still to be sent
  bool abandoned = false;       // destroyed by its owner, lives on in timewait
  Time deadline = Time::Never();
  bool has_remote_id = false;   // in remote_ids_
  bool has_remote_qpn = false;  // in remote_qpns_
};

template <typename Message>
MadPacket CmProtocol::Make(const CmPath& path, uint64_t tid, const Message& message,
                           uint32_t modifier) {
  MadPacket mad;
  mad.nic = path.nic;
  mad.sgid_index = path.sgid_index;
  mad.source = path.local_gid;
  mad.destination = path.remote_gid;
  mad.flow_label = path.flow_label;
  mad.traffic_class = path.traffic_class;
  mad.hop_limit = path.hop_limit;
  mad.pkey = path.pkey;
  MadHeader header;
  header.tid = tid;
  header.attribute = Message::kAttribute;
  header.modifier = modifier;
  header.Store(mad.bytes.data());
  message.Store(mad.bytes.data() + kMadHeaderBytes);
  return mad;
}

// Copies `from` to the front of a message's byte array. False: too long.
template <size_t kBytes>
bool CopyPrivateData(std::span<const std::byte> from, std::array<std::byte, kBytes>* to) {
  if (from.size() > kBytes) return false;
  for (size_t i = 0; i < from.size(); ++i) (*to)[i] = from[i];
  return true;
}

}  // namespace verbena::transport
