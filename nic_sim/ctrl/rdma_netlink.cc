// SPDX-License-Identifier: Apache-2.0
#include "nic_sim/ctrl/rdma_netlink.h"

#include <arpa/inet.h>
#include <linux/netlink.h>
#include <rdma/rdma_netlink.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <map>
#include <optional>
#include <string>

#include "nic_sim/abi/commands.h"
#include "nic_sim/runtime/version.h"

namespace verbena::nic {
namespace {

using nlohmann::json;
using Messages = std::vector<std::vector<std::byte>>;

constexpr uint32_t kPort = 1;

// A message, or a nest of attributes, as it grows.
class Writer {
 public:
  void Put(uint16_t type, const void* data, size_t size) {
    const size_t start = bytes_.size();
    const nlattr head = {static_cast<uint16_t>(sizeof(nlattr) + size), type};
    bytes_.resize(start + NLA_ALIGN(sizeof(nlattr) + size));
    std::memcpy(&bytes_[start], &head, sizeof(head));
    if (size > 0) std::memcpy(&bytes_[start + sizeof(head)], data, size);
  }
  void Put(uint16_t type, std::string_view text) {
    const std::string terminated(text);
    Put(type, terminated.c_str(), terminated.size() + 1);
  }
  void Put8(uint16_t type, uint8_t value) { Put(type, &value, sizeof(value)); }
  void Put32(uint16_t type, uint32_t value) { Put(type, &value, sizeof(value)); }
  void Put64(uint16_t type, uint64_t value) { Put(type, &value, sizeof(value)); }
  void Put(uint16_t type, const Writer& nest) {
    Put(type | NLA_F_NESTED, nest.bytes_.data(), nest.bytes_.size());
  }

  size_t size() const { return bytes_.size(); }
  const std::vector<std::byte>& bytes() const { return bytes_; }

 private:
  std::vector<std::byte> bytes_;
};

struct Request {
  nlmsghdr header{};
  std::optional<uint32_t> device;
  std::optional<uint32_t> port;
  std::optional<uint32_t> number;  // of one object: LQPN, CQN, MRN, PDN, CM_IDN, CTXN, SRQN
  std::optional<uint32_t> statistics_of;
  uint16_t operation() const { return RDMA_NL_GET_OP(header.nlmsg_type); }
  bool dump() const { return (header.nlmsg_flags & NLM_F_DUMP) == NLM_F_DUMP; }
};

// False: the attributes do not add up.
bool ParseAttributes(std::span<const std::byte> bytes, Request* request) {
  while (bytes.size() >= sizeof(nlattr)) {
    nlattr head;
    std::memcpy(&head, bytes.data(), sizeof(head));
    if (head.nla_len < sizeof(head) || head.nla_len > bytes.size()) return false;
    uint32_t value = 0;
    const bool has_value = head.nla_len >= sizeof(head) + sizeof(value);
    if (has_value) std::memcpy(&value, &bytes[sizeof(head)], sizeof(value));
    const auto take = [&](std::optional<uint32_t>* target) {
      if (has_value) *target = value;
      return has_value;
    };
    bool good = true;
    switch (head.nla_type & NLA_TYPE_MASK) {
      case RDMA_NLDEV_ATTR_DEV_INDEX:
        good = take(&request->device);
        break;
      case RDMA_NLDEV_ATTR_PORT_INDEX:
        good = take(&request->port);
        break;
      case RDMA_NLDEV_ATTR_STAT_RES:
        good = take(&request->statistics_of);
        break;
      case RDMA_NLDEV_ATTR_RES_LQPN:
      case RDMA_NLDEV_ATTR_RES_CQN:
      case RDMA_NLDEV_ATTR_RES_MRN:
      case RDMA_NLDEV_ATTR_RES_PDN:
      case RDMA_NLDEV_ATTR_RES_CM_IDN:
      case RDMA_NLDEV_ATTR_RES_CTXN:
      case RDMA_NLDEV_ATTR_RES_SRQN:
        good = take(&request->number);
        break;
      default:
        break;
    }
    if (!good) return false;
    bytes = bytes.subspan(std::min<size_t>(NLA_ALIGN(head.nla_len), bytes.size()));
  }
  return true;
}

std::vector<std::byte> Message(const Request& request, uint16_t type, uint16_t flags,
                               std::span<const std::byte> payload) {
  nlmsghdr header{};
  header.nlmsg_len = static_cast<uint32_t>(sizeof(header) + payload.size());
  header.nlmsg_type = type;
  header.nlmsg_flags = flags;
  header.nlmsg_seq = request.header.nlmsg_seq;
  header.nlmsg_pid = request.header.nlmsg_pid;
  std::vector<std::byte> bytes(NLMSG_ALIGN(header.nlmsg_len));
  std::memcpy(bytes.data(), &header, sizeof(header));
  std::copy(payload.begin(), payload.end(), bytes.begin() + sizeof(header));
  return bytes;
}

std::vector<std::byte> ErrorMessage(const Request& request, int error) {
  nlmsgerr text{};
  text.error = -error;
  text.msg = request.header;
  return Message(request, NLMSG_ERROR, 0, std::as_bytes(std::span(&text, 1)));
}

uint64_t Number(const json& item, const char* name) {
  const auto found = item.find(name);
  return found != item.end() && found->is_number() ? found->get<uint64_t>() : 0;
}
uint32_t Number32(const json& item, const char* name) {
  return static_cast<uint32_t>(Number(item, name));
}
std::string Text(const json& item, const char* name) {
  const auto found = item.find(name);
  return found != item.end() && found->is_string() ? found->get<std::string>() : std::string();
}

uint8_t QpTypeOf(std::string_view name) {
  static const std::map<std::string_view, uint8_t> kTypes = {
      {"SMI", 0},        {"GSI", 1},      {"RC", 2},      {"UC", 3},        {"UD", 4},
      {"RAW_PACKET", 8}, {"XRC_SEND", 9}, {"XRC_INI", 9}, {"XRC_RECV", 10}, {"XRC_TGT", 10}};
  const auto found = kTypes.find(name);
  return found == kTypes.end() ? 2 : found->second;
}

uint8_t QpStateOf(std::string_view name) {
  static constexpr std::string_view kStates[] = {"RESET", "INIT", "RTR", "RTS",
                                                 "SQD",   "SQE",  "ERR"};
  for (uint8_t i = 0; i < std::size(kStates); ++i) {
    if (kStates[i] == name) return i;
  }
  return 0;
}

// In the order of the kernel's enum rdma_cm_state.
uint8_t CmStateOf(std::string_view name) {
  static constexpr std::string_view kStates[] = {
      "idle",       "addr_query", "addr_resolved", "route_query",    "route_resolved", "connect",
      "disconnect", "addr_bound", "listen",        "device_removal", "destroying"};
  std::string lower(name);
  for (char& c : lower) c = c == '-' || c == ' ' ? '_' : static_cast<char>(std::tolower(c));
  for (uint8_t i = 0; i < std::size(kStates); ++i) {
    if (kStates[i] == lower) return i;
  }
  return 0;
}

// "127.88.0.1:7174" or "[fe80::1]:7174".
void PutAddress(Writer* out, uint16_t type, const std::string& text) {
  const size_t colon = text.rfind(':');
  if (colon == std::string::npos) return;
  std::string host = text.substr(0, colon);
  const uint16_t port = htons(static_cast<uint16_t>(std::atoi(text.c_str() + colon + 1)));
  if (host.size() >= 2 && host.front() == '[') host = host.substr(1, host.size() - 2);
  sockaddr_storage storage{};
  sockaddr_in v4{};
  sockaddr_in6 v6{};
  if (inet_pton(AF_INET, host.c_str(), &v4.sin_addr) == 1) {
    v4.sin_family = AF_INET;
    v4.sin_port = port;
    std::memcpy(&storage, &v4, sizeof(v4));
  } else if (inet_pton(AF_INET6, host.c_str(), &v6.sin6_addr) == 1) {
    v6.sin6_family = AF_INET6;
    v6.sin6_port = port;
    std::memcpy(&storage, &v6, sizeof(v6));
  } else {
    return;
  }
  out->Put(type, &storage, sizeof(storage));
}

void PutQp(const json& item, Writer* out) {
  const uint8_t type = QpTypeOf(Text(item, "type"));
  out->Put32(RDMA_NLDEV_ATTR_PORT_INDEX, kPort);
  out->Put32(RDMA_NLDEV_ATTR_RES_LQPN, Number32(item, "qpn"));
  if (type == 2 || type == 3) {
    out->Put32(RDMA_NLDEV_ATTR_RES_RQPN, Number32(item, "dest_qpn"));
    out->Put32(RDMA_NLDEV_ATTR_RES_RQ_PSN, Number32(item, "rq_psn"));
    out->Put8(RDMA_NLDEV_ATTR_RES_PATH_MIG_STATE, 0);  // migrated
  }
  out->Put32(RDMA_NLDEV_ATTR_RES_SQ_PSN, Number32(item, "sq_psn"));
  out->Put8(RDMA_NLDEV_ATTR_RES_TYPE, type);
  out->Put8(RDMA_NLDEV_ATTR_RES_STATE, QpStateOf(Text(item, "state")));
  if (item.contains("pdn")) out->Put32(RDMA_NLDEV_ATTR_RES_PDN, Number32(item, "pdn"));
}

void PutCq(const json& item, Writer* out) {
  out->Put32(RDMA_NLDEV_ATTR_RES_CQE, Number32(item, "cqe"));
  out->Put64(RDMA_NLDEV_ATTR_RES_USECNT, Number(item, "qps"));
  out->Put32(RDMA_NLDEV_ATTR_RES_CQN, Number32(item, "cqn"));
}

void PutMr(const json& item, Writer* out) {
  out->Put32(RDMA_NLDEV_ATTR_RES_RKEY, Number32(item, "rkey"));
  out->Put32(RDMA_NLDEV_ATTR_RES_LKEY, Number32(item, "lkey"));
  out->Put64(RDMA_NLDEV_ATTR_RES_IOVA, Number(item, "iova"));
  out->Put64(RDMA_NLDEV_ATTR_RES_MRLEN, Number(item, "length"));
  out->Put32(RDMA_NLDEV_ATTR_RES_MRN, Number32(item, "lkey") >> 8);
  out->Put32(RDMA_NLDEV_ATTR_RES_PDN, Number32(item, "pdn"));
}

void PutPd(const json& item, Writer* out) {
  out->Put64(RDMA_NLDEV_ATTR_RES_USECNT, Number(item, "objects"));
  out->Put32(RDMA_NLDEV_ATTR_RES_PDN, Number32(item, "pdn"));
}

void PutContext(const json& item, Writer* out) {
  out->Put32(RDMA_NLDEV_ATTR_RES_CTXN, Number32(item, "cookie"));
}

void PutSrq(const json& item, Writer* out) {
  const bool is_xrc = Text(item, "type") == "XRC";
  out->Put32(RDMA_NLDEV_ATTR_RES_SRQN, Number32(item, "srqn"));
  out->Put8(RDMA_NLDEV_ATTR_RES_TYPE, is_xrc ? 1 : 0);
  out->Put32(RDMA_NLDEV_ATTR_RES_PDN, Number32(item, "pdn"));
  if (is_xrc) out->Put32(RDMA_NLDEV_ATTR_RES_CQN, Number32(item, "cqn"));
  Writer qps;
  // More would not fit into a message; the kernel folds neighbours instead.
  constexpr size_t kMostQps = 128;
  const auto found = item.find("qpns");
  for (size_t i = 0; found != item.end() && i < std::min(found->size(), kMostQps); ++i) {
    Writer qp;
    qp.Put32(RDMA_NLDEV_ATTR_RES_LQPN, (*found)[i].get<uint32_t>());
    qps.Put(RDMA_NLDEV_ATTR_RES_QP_ENTRY, qp);
  }
  if (qps.size() > 0) out->Put(RDMA_NLDEV_ATTR_RES_QP, qps);
}

void PutCmId(const json& item, Writer* out) {
  out->Put32(RDMA_NLDEV_ATTR_PORT_INDEX, kPort);
  out->Put32(RDMA_NLDEV_ATTR_RES_PS, Number32(item, "port_space"));
  if (Number(item, "qpn") != 0) {
    out->Put32(RDMA_NLDEV_ATTR_RES_LQPN, Number32(item, "qpn"));
    out->Put8(RDMA_NLDEV_ATTR_RES_TYPE, static_cast<uint8_t>(Number(item, "qp_type")));
  }
  out->Put8(RDMA_NLDEV_ATTR_RES_STATE, CmStateOf(Text(item, "state")));
  PutAddress(out, RDMA_NLDEV_ATTR_RES_SRC_ADDR, Text(item, "source"));
  PutAddress(out, RDMA_NLDEV_ATTR_RES_DST_ADDR, Text(item, "destination"));
  out->Put32(RDMA_NLDEV_ATTR_RES_CM_IDN, Number32(item, "id"));
}

// A kind of object: how the kernel and how our own listings call it.
struct ObjectKind {
  uint16_t operation;
  const char* listing;
  const char* summary;
  uint16_t table;
  uint16_t entry;
  void (*put)(const json& item, Writer* out);
  uint32_t (*number)(const json& item);
};

constexpr ObjectKind kKinds[] = {
    {RDMA_NLDEV_CMD_RES_PD_GET, "pd", "pd", RDMA_NLDEV_ATTR_RES_PD, RDMA_NLDEV_ATTR_RES_PD_ENTRY,
     PutPd, [](const json& item) { return Number32(item, "pdn"); }},
    {RDMA_NLDEV_CMD_RES_CQ_GET, "cq", "cq", RDMA_NLDEV_ATTR_RES_CQ, RDMA_NLDEV_ATTR_RES_CQ_ENTRY,
     PutCq, [](const json& item) { return Number32(item, "cqn"); }},
    {RDMA_NLDEV_CMD_RES_QP_GET, "qp", "qp", RDMA_NLDEV_ATTR_RES_QP, RDMA_NLDEV_ATTR_RES_QP_ENTRY,
     PutQp, [](const json& item) { return Number32(item, "qpn"); }},
    {RDMA_NLDEV_CMD_RES_CM_ID_GET, "cm_id", "cm_id", RDMA_NLDEV_ATTR_RES_CM_ID,
     RDMA_NLDEV_ATTR_RES_CM_ID_ENTRY, PutCmId,
     [](const json& item) { return Number32(item, "id"); }},
    {RDMA_NLDEV_CMD_RES_MR_GET, "mr", "mr", RDMA_NLDEV_ATTR_RES_MR, RDMA_NLDEV_ATTR_RES_MR_ENTRY,
     PutMr, [](const json& item) { return Number32(item, "lkey") >> 8; }},
    {RDMA_NLDEV_CMD_RES_CTX_GET, "context", "ctx", RDMA_NLDEV_ATTR_RES_CTX,
     RDMA_NLDEV_ATTR_RES_CTX_ENTRY, PutContext,
     [](const json& item) { return Number32(item, "cookie"); }},
    {RDMA_NLDEV_CMD_RES_SRQ_GET, "srq", "srq", RDMA_NLDEV_ATTR_RES_SRQ,
     RDMA_NLDEV_ATTR_RES_SRQ_ENTRY, PutSrq,
     [](const json& item) { return Number32(item, "srqn"); }},
};

class Answerer {
 public:
  Answerer(const Request& request, Hardware* hardware, std::optional<uid_t> user)
      : request_(request), hardware_(*hardware), user_(user) {}

  Messages Run() {
    const int error = Carry();
    if (error != 0) return {ErrorMessage(request_, error)};
    if (request_.dump()) {
      const int32_t done = 0;
      messages_.push_back(
          Message(request_, NLMSG_DONE, NLM_F_MULTI, std::as_bytes(std::span(&done, 1))));
    } else if ((request_.header.nlmsg_flags & NLM_F_ACK) != 0) {
      messages_.push_back(ErrorMessage(request_, 0));
    }
    return std::move(messages_);
  }

 private:
  // 0 with messages, or errno.
  int Carry() {
    for (const ObjectKind& kind : kKinds) {
      if (kind.operation == request_.operation()) return Objects(kind);
    }
    switch (request_.operation()) {
      case RDMA_NLDEV_CMD_GET:
        return ForDevices(&Answerer::Device);
      case RDMA_NLDEV_CMD_PORT_GET:
        return Ports();
      case RDMA_NLDEV_CMD_RES_GET:
        return ForDevices(&Answerer::Summary);
      case RDMA_NLDEV_CMD_STAT_GET:
        return Statistics();
      case RDMA_NLDEV_CMD_SYS_GET:
        return System();
      case RDMA_NLDEV_CMD_SET:
      case RDMA_NLDEV_CMD_NEWLINK:
      case RDMA_NLDEV_CMD_DELLINK:
      case RDMA_NLDEV_CMD_SYS_SET:
      case RDMA_NLDEV_CMD_STAT_SET:
      case RDMA_NLDEV_CMD_STAT_DEL:
        return EPERM;
      default:
        return EOPNOTSUPP;
    }
  }

  // The devices that a request is about: one, or of a dump without index all.
  int ForDevices(int (Answerer::*add)(size_t nic)) {
    if (request_.device.has_value()) {
      const uint64_t nic = uint64_t{*request_.device} - kFirstDeviceIndex;
      return IsThere(nic) ? (this->*add)(nic) : ENODEV;
    }
    if (!request_.dump()) return EINVAL;
    for (size_t nic = 0; nic < hardware_.nic_count(); ++nic) {
      if (!IsThere(nic)) continue;
      if (const int error = (this->*add)(nic); error != 0) return error;
    }
    return 0;
  }

  void Add(const Writer& out) {
    messages_.push_back(Message(request_, request_.header.nlmsg_type,
                                request_.dump() ? NLM_F_MULTI : uint16_t{0}, out.bytes()));
  }

  Writer Head(size_t nic) {
    Writer out;
    out.Put32(RDMA_NLDEV_ATTR_DEV_INDEX, static_cast<uint32_t>(nic) + kFirstDeviceIndex);
    out.Put(RDMA_NLDEV_ATTR_DEV_NAME, hardware_.nic_info(nic).device);
    return out;
  }

  int Device(size_t nic) {
    const NicInfo info = hardware_.nic_info(nic);
    Writer out = Head(nic);
    out.Put32(RDMA_NLDEV_ATTR_PORT_INDEX, kPort);
    out.Put64(RDMA_NLDEV_ATTR_CAP_FLAGS, 0);
    out.Put(RDMA_NLDEV_ATTR_FW_VERSION, kVersion);
    out.Put64(RDMA_NLDEV_ATTR_NODE_GUID, info.node_guid);
    out.Put64(RDMA_NLDEV_ATTR_SYS_IMAGE_GUID, info.node_guid);
    out.Put8(RDMA_NLDEV_ATTR_DEV_NODE_TYPE, 1);  // CA
    out.Put(RDMA_NLDEV_ATTR_DEV_PROTOCOL, "roce");
    Add(out);
    return 0;
  }

  int Ports() {
    if (!request_.dump() && request_.port.value_or(kPort) != kPort) return EINVAL;
    return ForDevices(&Answerer::Port);
  }

  int Port(size_t nic) {
    const bool active = LinkIsUp(nic);
    Writer out = Head(nic);
    out.Put32(RDMA_NLDEV_ATTR_PORT_INDEX, kPort);
    out.Put8(RDMA_NLDEV_ATTR_PORT_STATE, active ? 4 : 1);
    out.Put8(RDMA_NLDEV_ATTR_PORT_PHYS_STATE, active ? 5 : 3);
    out.Put32(RDMA_NLDEV_ATTR_NDEV_INDEX, abi::NetdevIndex(static_cast<uint32_t>(nic)));
    out.Put(RDMA_NLDEV_ATTR_NDEV_NAME, hardware_.nic_info(nic).device);
    Add(out);
    return 0;
  }

  bool IsThere(size_t nic) {
    return nic < hardware_.nic_count() && hardware_.nic_info(nic).present;
  }
  bool LinkIsUp(size_t nic) { return hardware_.nic_info(nic).active; }

  // Items of one device.
  std::vector<json> List(const char* what, size_t nic) {
    json all = hardware_.List(what, user_);
    std::vector<json> items;
    const auto found = all.is_object() ? all.find("items") : all.end();
    if (!all.is_object() || found == all.end()) return items;
    const std::string device = hardware_.nic_info(nic).device;
    for (json& item : *found) {
      // An id that is bound to no device is shown nowhere, as on Linux.
      if (Text(item, "device") == device) items.push_back(std::move(item));
    }
    return items;
  }

  int Summary(size_t nic) {
    Writer table;
    for (const ObjectKind& kind : kKinds) {
      Writer entry;
      entry.Put(RDMA_NLDEV_ATTR_RES_SUMMARY_ENTRY_NAME, kind.summary);
      entry.Put64(RDMA_NLDEV_ATTR_RES_SUMMARY_ENTRY_CURR, List(kind.listing, nic).size());
      table.Put(RDMA_NLDEV_ATTR_RES_SUMMARY_ENTRY, entry);
    }
    Writer out = Head(nic);
    out.Put(RDMA_NLDEV_ATTR_RES_SUMMARY, table);
    Add(out);
    return 0;
  }

  int Objects(const ObjectKind& kind) {
    if (!request_.device.has_value()) return EINVAL;
    const uint64_t nic = uint64_t{*request_.device} - kFirstDeviceIndex;
    if (!IsThere(nic)) return ENODEV;
    const std::vector<json> items = List(kind.listing, nic);
    if (!request_.dump()) return OneObject(kind, nic, items);
    // As many entries as fit into a message.
    constexpr size_t kRoom = abi::kMaxNetlinkReply - 256;
    Writer table;
    const auto flush = [&] {
      Writer out = Head(nic);
      out.Put(kind.table, table);
      Add(out);
      table = Writer();
    };
    for (const json& item : items) {
      Writer entry;
      kind.put(item, &entry);
      entry.Put32(RDMA_NLDEV_ATTR_RES_PID, Number32(item, "pid"));
      if (table.size() + entry.size() + sizeof(nlattr) > kRoom) flush();
      table.Put(kind.entry, entry);
    }
    if (table.size() > 0) flush();
    return 0;
  }

  int OneObject(const ObjectKind& kind, size_t nic, const std::vector<json>& items) {
    if (!request_.number.has_value()) return EINVAL;
    for (const json& item : items) {
      if (kind.number(item) != *request_.number) continue;
      Writer out = Head(nic);
      kind.put(item, &out);
      out.Put32(RDMA_NLDEV_ATTR_RES_PID, Number32(item, "pid"));
      Add(out);
      return 0;
    }
    return ENOENT;
  }

  int Statistics() {
    // Each QP has counters of its own, as if in the automatic mode by QP.
    if (request_.statistics_of == uint32_t{RDMA_NLDEV_ATTR_RES_QP} && request_.dump()) {
      return ForDevices(&Answerer::QpCounters);
    }
    // Counters of MRs: there are none.
    if (request_.statistics_of.has_value()) return request_.dump() ? 0 : EOPNOTSUPP;
    if (request_.port.value_or(kPort) != kPort) return EINVAL;
    return ForDevices(&Answerer::HardwareCounters);
  }

  static Writer CounterTable(const json& counters) {
    Writer table;
    for (const auto& [name, value] : counters.items()) {
      Writer entry;
      entry.Put(RDMA_NLDEV_ATTR_STAT_HWCOUNTER_ENTRY_NAME, name);
      entry.Put64(RDMA_NLDEV_ATTR_STAT_HWCOUNTER_ENTRY_VALUE, value.get<uint64_t>());
      table.Put(RDMA_NLDEV_ATTR_STAT_HWCOUNTER_ENTRY, entry);
    }
    return table;
  }

  // A message for each QP: its counters, under its number.
  int QpCounters(size_t nic) {
    for (const json& item : List("qp", nic)) {
      const auto counters = item.find("counters");
      if (counters == item.end() || !counters->is_object()) continue;
      Writer qp;
      qp.Put32(RDMA_NLDEV_ATTR_RES_LQPN, Number32(item, "qpn"));
      Writer qps;
      qps.Put(RDMA_NLDEV_ATTR_RES_QP_ENTRY, qp);
      Writer entry;
      entry.Put32(RDMA_NLDEV_ATTR_PORT_INDEX, kPort);
      entry.Put32(RDMA_NLDEV_ATTR_STAT_COUNTER_ID, Number32(item, "qpn"));
      entry.Put8(RDMA_NLDEV_ATTR_RES_TYPE, QpTypeOf(Text(item, "type")));
      entry.Put32(RDMA_NLDEV_ATTR_RES_PID, Number32(item, "pid"));
      entry.Put(RDMA_NLDEV_ATTR_RES_QP, qps);
      entry.Put(RDMA_NLDEV_ATTR_STAT_HWCOUNTERS, CounterTable(*counters));
      Writer table;
      table.Put(RDMA_NLDEV_ATTR_STAT_COUNTER_ENTRY, entry);
      Writer out = Head(nic);
      out.Put(RDMA_NLDEV_ATTR_STAT_COUNTER, table);
      Add(out);
    }
    return 0;
  }

  int HardwareCounters(size_t nic) {
    const std::string device = hardware_.nic_info(nic).device;
    const json all = hardware_.Counters(device);
    Writer table;
    if (const json::json_pointer path("/devices/" + device + "/hw_counters"); all.contains(path)) {
      table = CounterTable(all[path]);
    }
    Writer out = Head(nic);
    out.Put32(RDMA_NLDEV_ATTR_PORT_INDEX, kPort);
    out.Put(RDMA_NLDEV_ATTR_STAT_HWCOUNTERS, table);
    Add(out);
    return 0;
  }

  int System() {
    Writer out;
    out.Put8(RDMA_NLDEV_SYS_ATTR_NETNS_MODE, 1);    // shared
    out.Put8(RDMA_NLDEV_SYS_ATTR_COPY_ON_FORK, 1);  // nothing is pinned
    Add(out);
    return 0;
  }

  const Request& request_;
  Hardware& hardware_;
  const std::optional<uid_t> user_;
  Messages messages_;
};

}  // namespace

Messages AnswerNetlink(std::span<const std::byte> message, Hardware* hardware,
                       std::optional<uid_t> user) {
  Request request;
  if (message.size() < sizeof(request.header)) return {};
  std::memcpy(&request.header, message.data(), sizeof(request.header));
  const uint32_t length = request.header.nlmsg_len;
  if (length < sizeof(request.header) || length > message.size()) return {};
  if ((request.header.nlmsg_flags & NLM_F_REQUEST) == 0) return {};
  if (RDMA_NL_GET_CLIENT(request.header.nlmsg_type) != RDMA_NL_NLDEV) {
    return {ErrorMessage(request, EOPNOTSUPP)};
  }
  if (!ParseAttributes(message.subspan(sizeof(request.header), length - sizeof(request.header)),
                       &request)) {
    return {ErrorMessage(request, EINVAL)};
  }
  return Answerer(request, hardware, user).Run();
}

}  // namespace verbena::nic
