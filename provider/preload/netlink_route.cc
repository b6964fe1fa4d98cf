// SPDX-License-Identifier: Apache-2.0
#include "provider/preload/netlink_route.h"

#include <linux/if_addr.h>
#include <linux/if_link.h>
#include <linux/neighbour.h>
#include <linux/netlink.h>
#include <linux/rtnetlink.h>
#include <net/if.h>
#include <net/if_arp.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstdint>
#include <cstdlib>
#include <cstring>

#include "provider/preload/interpose.h"
#include "provider/preload/netdevs.h"

namespace verbena::provider {
namespace {

constexpr int kTableFds = 1024;
constexpr size_t kMostRequest = 2048;
constexpr size_t kMostDatagram = 128 << 10;
// Messages of ours that are added as a datagram of their own: fits whatever
// buffer programs have.
constexpr size_t kChunk = 3072;
// Marks a question for us: no kernel has so many message types.
constexpr uint16_t kOurs = 0x4000;
constexpr unsigned kLoopbackIndex = 1;

// What is outstanding on a socket. A socket has one dump at a time.
struct Outstanding {
  std::atomic<bool> is_route{false};
  std::atomic<bool> question{false};
  std::atomic<uint16_t> dump{0};  // message type; 0: none
  std::atomic<uint8_t> family{0};
  std::atomic<uint32_t> sequence{0};
  std::atomic<uint32_t> told{0};  // of our messages
};
Outstanding g_sockets[kTableFds];

// Messages in a row.
class Writer {
 public:
  Writer(char* buffer, size_t room) : buffer_(buffer), room_(room) {}

  void Begin(const nlmsghdr& request, uint16_t type, uint16_t flags) {
    start_ = used_;
    nlmsghdr header = {};
    header.nlmsg_type = type;
    header.nlmsg_flags = flags;
    header.nlmsg_seq = request.nlmsg_seq;
    header.nlmsg_pid = request.nlmsg_pid;
    Raw(&header, sizeof(header));
  }
  void Raw(const void* data, size_t size) {
    const size_t padded = NLMSG_ALIGN(size);
    if (room_ - used_ < padded) {
      full_ = true;
      return;
    }
    memset(buffer_ + used_, 0, padded);
    memcpy(buffer_ + used_, data, size);
    used_ += padded;
  }
  void Put(uint16_t type, const void* data, size_t size) {
    const rtattr head = {static_cast<uint16_t>(RTA_LENGTH(size)), type};
    Raw(&head, sizeof(head));
    Raw(data, size);
  }
  void Put32(uint16_t type, uint32_t value) { Put(type, &value, sizeof(value)); }
  void Put8(uint16_t type, uint8_t value) { Put(type, &value, sizeof(value)); }
  // False: it did not fit, and is taken back.
  bool End() {
    if (full_) {
      used_ = start_;
      full_ = false;
      return false;
    }
    const uint32_t length = static_cast<uint32_t>(used_ - start_);
    memcpy(buffer_ + start_, &length, sizeof(length));
    return true;
  }
  size_t used() const { return used_; }

 private:
  char* buffer_;
  size_t room_;
  size_t used_ = 0;
  size_t start_ = 0;
  bool full_ = false;
};

// What a request asks for.
struct Question {
  nlmsghdr header = {};
  uint8_t family = 0;
  uint32_t index = 0;  // of an interface; 0: all
  char name[IFNAMSIZ] = {};
  uint32_t table = 0;    // of routes; 0: all
  bool special = false;  // something that our interfaces have none of
  bool has_destination = false;
  in6_addr destination = {};
  uint16_t type() const { return header.nlmsg_type & static_cast<uint16_t>(~kOurs); }
  bool dump() const { return (header.nlmsg_flags & NLM_F_DUMP) == NLM_F_DUMP; }
};

size_t AddressBytes(uint8_t family) { return family == AF_INET ? 4 : 16; }

// False: no question that we know, or not well formed.
bool Parse(const char* bytes, size_t size, Question* question) {
  if (size < sizeof(nlmsghdr)) return false;
  memcpy(&question->header, bytes, sizeof(nlmsghdr));
  const size_t length = question->header.nlmsg_len;
  if (length < sizeof(nlmsghdr) || length > size) return false;
  size_t at = NLMSG_HDRLEN;
  const auto load = [&](auto* head) {
    if (length < at + sizeof(*head)) return false;
    memcpy(head, bytes + at, sizeof(*head));
    at += NLMSG_ALIGN(sizeof(*head));
    return true;
  };
  union {
    ifinfomsg link;
    ifaddrmsg address;
    rtmsg route;
    ndmsg neighbour;
    rtgenmsg any;
  } head = {};
  uint16_t index_attribute = 0;
  switch (question->type()) {
    case RTM_GETLINK:
      if (!load(&head.link)) {
        // Old programs send less with a dump.
        at = length;
      }
      question->family = head.link.ifi_family;
      question->index = static_cast<uint32_t>(head.link.ifi_index);
      question->special = question->family == AF_BRIDGE;
      break;
    case RTM_GETADDR:
      if (!load(&head.address)) {
        if (length < NLMSG_HDRLEN + sizeof(rtgenmsg)) return false;
        memcpy(&head.any, bytes + at, sizeof(rtgenmsg));
        question->family = head.any.rtgen_family;
        at = length;
        break;
      }
      question->family = head.address.ifa_family;
      question->index = head.address.ifa_index;
      break;
    case RTM_GETROUTE:
      if (!load(&head.route)) return false;
      question->family = head.route.rtm_family;
      question->table = head.route.rtm_table;
      question->special = (head.route.rtm_flags & RTM_F_CLONED) != 0 && question->dump();
      index_attribute = RTA_OIF;
      break;
    case RTM_GETNEIGH:
      if (!load(&head.neighbour)) return false;
      question->family = head.neighbour.ndm_family;
      question->index = static_cast<uint32_t>(head.neighbour.ndm_ifindex);
      question->special = (head.neighbour.ndm_flags & NTF_PROXY) != 0;
      index_attribute = NDA_IFINDEX;
      break;
    default:
      return false;
  }
  while (at + sizeof(rtattr) <= length) {
    rtattr attribute;
    memcpy(&attribute, bytes + at, sizeof(attribute));
    if (attribute.rta_len < sizeof(attribute) || at + attribute.rta_len > length) return false;
    const char* const data = bytes + at + RTA_LENGTH(0);
    const size_t bytes_of = attribute.rta_len - RTA_LENGTH(0);
    const uint16_t type = attribute.rta_type & NLA_TYPE_MASK;
    const auto number = [&](uint32_t* to) {
      if (bytes_of >= sizeof(*to)) memcpy(to, data, sizeof(*to));
    };
    if (index_attribute != 0 && type == index_attribute) number(&question->index);
    if (question->type() == RTM_GETLINK && type == IFLA_IFNAME) {
      memcpy(question->name, data,
             bytes_of < sizeof(question->name) ? bytes_of : sizeof(question->name) - 1);
    }
    if (question->type() == RTM_GETLINK && (type == IFLA_MASTER || type == IFLA_LINKINFO)) {
      question->special = true;  // slaves, and interfaces of one kind
    }
    if (question->type() == RTM_GETROUTE && type == RTA_TABLE) number(&question->table);
    if (question->type() == RTM_GETROUTE && type == RTA_DST &&
        bytes_of == AddressBytes(question->family)) {
      question->has_destination = true;
      memcpy(&question->destination, data, bytes_of);
    }
    at += RTA_ALIGN(attribute.rta_len);
  }
  return true;
}

bool SamePrefix(const in6_addr& a, const in6_addr& b, unsigned bits) {
  for (size_t i = 0; bits > 0; ++i, bits -= bits < 8 ? bits : 8) {
    const unsigned keep = bits >= 8 ? 0xffu : 0xffu << (8 - bits) & 0xffu;
    if (((a.s6_addr[i] ^ b.s6_addr[i]) & keep) != 0) return false;
  }
  return true;
}

unsigned HostBits(const NetdevAddress& address) { return address.family == AF_INET ? 32 : 128; }

bool IsFirstOfNetdev(const Netdevs& netdevs, const NetdevAddress* address) {
  return address == netdevs.begin() || address[-1].index != address->index;
}

// Which of our interfaces has a route of its own to the destination; nullptr:
// none, the kernel may know. 127.0.0.0/8 is local to the kernel's loopback.
const NetdevAddress* RouteTo(const Netdevs& netdevs, const Question& question, bool* own) {
  *own = false;
  const NetdevAddress* best = nullptr;
  for (const NetdevAddress& each : netdevs) {
    if (each.family != question.family) continue;
    if (question.index != 0 && each.index != question.index) continue;
    if (SamePrefix(each.address, question.destination, HostBits(each))) {
      *own = true;
      return &each;
    }
    if (SamePrefix(each.address, question.destination, each.prefix) &&
        (best == nullptr || each.prefix > best->prefix)) {
      best = &each;
    }
  }
  return best;
}

bool PutLink(Writer* to, const Question& question, uint16_t flags, const NetdevAddress& netdev) {
  to->Begin(question.header, RTM_NEWLINK, flags);
  ifinfomsg head = {};
  head.ifi_family = question.dump() && question.family == AF_INET6 ? AF_INET6 : AF_UNSPEC;
  head.ifi_type = ARPHRD_ETHER;
  head.ifi_index = static_cast<int>(netdev.index);
  head.ifi_flags = kNetdevFlags | 0x10000;  // IFF_LOWER_UP
  to->Raw(&head, sizeof(head));
  to->Put(IFLA_IFNAME, netdev.name, strnlen(netdev.name, sizeof(netdev.name) - 1) + 1);
  to->Put32(IFLA_TXQLEN, 1000);
  to->Put8(IFLA_OPERSTATE, 6);  // up
  to->Put8(IFLA_LINKMODE, 0);
  to->Put32(IFLA_MTU, netdev.mtu);
  to->Put32(IFLA_GROUP, 0);
  to->Put32(IFLA_PROMISCUITY, 0);
  to->Put32(IFLA_NUM_TX_QUEUES, 1);
  to->Put32(IFLA_NUM_RX_QUEUES, 1);
  to->Put8(IFLA_CARRIER, 1);
  to->Put(IFLA_QDISC, "noqueue", sizeof("noqueue"));
  to->Put(IFLA_ADDRESS, netdev.mac, sizeof(netdev.mac));
  const uint8_t broadcast[6] = {0xff, 0xff, 0xff, 0xff, 0xff, 0xff};
  to->Put(IFLA_BROADCAST, broadcast, sizeof(broadcast));
  return to->End();
}

bool PutAddress(Writer* to, const Question& question, uint16_t flags, const NetdevAddress& from) {
  to->Begin(question.header, RTM_NEWADDR, flags);
  const bool ipv4 = from.family == AF_INET;
  ifaddrmsg head = {};
  head.ifa_family = static_cast<uint8_t>(from.family);
  head.ifa_prefixlen = from.prefix;
  head.ifa_flags = IFA_F_PERMANENT;
  head.ifa_scope =
      !ipv4 && IN6_IS_ADDR_LINKLOCAL(&from.address) ? RT_SCOPE_LINK : RT_SCOPE_UNIVERSE;
  head.ifa_index = from.index;
  to->Raw(&head, sizeof(head));
  const size_t bytes = AddressBytes(head.ifa_family);
  to->Put(IFA_ADDRESS, &from.address, bytes);
  if (ipv4) {
    to->Put(IFA_LOCAL, &from.address, bytes);
    if (from.prefix < 31) {
      uint8_t broadcast[4];
      for (unsigned i = 0; i < 4; ++i) {
        const unsigned kept = from.prefix > i * 8 ? from.prefix - i * 8 : 0;
        broadcast[i] =
            static_cast<uint8_t>(from.address.s6_addr[i] | (kept >= 8 ? 0 : 0xff >> kept));
      }
      to->Put(IFA_BROADCAST, broadcast, sizeof(broadcast));
    }
    to->Put(IFA_LABEL, from.name, strnlen(from.name, sizeof(from.name) - 1) + 1);
  }
  to->Put32(IFA_FLAGS, IFA_F_PERMANENT);
  const ifa_cacheinfo forever = {0xffffffff, 0xffffffff, 0, 0};
  to->Put(IFA_CACHEINFO, &forever, sizeof(forever));
  return to->End();
}

// `to_subnet`: the route to the whole subnet, of a dump.
bool PutRoute(Writer* to, const Question& question, uint16_t flags, const NetdevAddress& from,
              bool to_subnet, bool own) {
  to->Begin(question.header, RTM_NEWROUTE, flags);
  rtmsg head = {};
  head.rtm_family = static_cast<uint8_t>(from.family);
  head.rtm_dst_len = to_subnet ? from.prefix : static_cast<uint8_t>(HostBits(from));
  head.rtm_table = own ? RT_TABLE_LOCAL : RT_TABLE_MAIN;
  head.rtm_protocol = to_subnet ? RTPROT_KERNEL : RTPROT_UNSPEC;
  head.rtm_scope = to_subnet && from.family == AF_INET ? RT_SCOPE_LINK : RT_SCOPE_UNIVERSE;
  head.rtm_type = own ? RTN_LOCAL : RTN_UNICAST;
  head.rtm_flags = to_subnet ? 0 : RTM_F_CLONED;
  to->Raw(&head, sizeof(head));
  to->Put32(RTA_TABLE, head.rtm_table);
  const size_t bytes = AddressBytes(head.rtm_family);
  in6_addr destination = question.destination;
  if (to_subnet) {
    destination = from.address;
    for (unsigned bit = from.prefix; bit < bytes * 8; ++bit) {
      destination.s6_addr[bit / 8] &= static_cast<uint8_t>(~(0x80u >> bit % 8));
    }
  }
  to->Put(RTA_DST, &destination, bytes);
  to->Put32(RTA_OIF, own ? kLoopbackIndex : from.index);
  if (!to_subnet || from.family == AF_INET) to->Put(RTA_PREFSRC, &from.address, bytes);
  if (from.family == AF_INET6) to->Put32(RTA_PRIORITY, own ? 0 : 256);
  return to->End();
}

bool PutNeighbour(Writer* to, const Question& question, uint16_t flags, uint32_t index,
                  const NetdevAddress& neighbour) {
  to->Begin(question.header, RTM_NEWNEIGH, flags);
  ndmsg head = {};
  head.ndm_family = static_cast<uint8_t>(neighbour.family);
  head.ndm_ifindex = static_cast<int>(index);
  head.ndm_state = NUD_PERMANENT;
  head.ndm_type = RTN_UNICAST;
  to->Raw(&head, sizeof(head));
  to->Put(NDA_DST, &neighbour.address, AddressBytes(head.ndm_family));
  to->Put(NDA_LLADDR, neighbour.mac, sizeof(neighbour.mac));
  return to->End();
}

// Calls put(message) for each message about `each` until it returns false.
template <typename Put>
bool ForEachItemOf(const Netdevs& netdevs, const Question& question, const NetdevAddress& each,
                   Put put) {
  const uint16_t flags = NLM_F_MULTI;
  switch (question.type()) {
    case RTM_GETADDR:
      return put([&](Writer* to) { return PutAddress(to, question, flags, each); });
    case RTM_GETROUTE:
      return each.prefix == HostBits(each) ||
             put([&](Writer* to) { return PutRoute(to, question, flags, each, true, false); });
    case RTM_GETNEIGH:
      // The NICs of a daemon know each other.
      for (const NetdevAddress& other : netdevs) {
        if (other.index == each.index || other.family != each.family ||
            !SamePrefix(each.address, other.address, each.prefix)) {
          continue;
        }
        if (!put(
                [&](Writer* to) { return PutNeighbour(to, question, flags, each.index, other); })) {
          return false;
        }
      }
      return true;
    default:
      return true;
  }
}

// The same for a whole dump, in the order of the kernel: IPv4, then IPv6.
template <typename Put>
void ForEachItem(const Netdevs& netdevs, const Question& question, Put put) {
  const bool links = question.type() == RTM_GETLINK;
  for (const int family : {AF_INET, AF_INET6}) {
    if (!links && question.family != AF_UNSPEC && question.family != family) continue;
    if (links && family == AF_INET6) return;
    for (const NetdevAddress& each : netdevs) {
      if (question.index != 0 && each.index != question.index) continue;
      if (links) {
        if (IsFirstOfNetdev(netdevs, &each) &&
            !put([&](Writer* to) { return PutLink(to, question, NLM_F_MULTI, each); })) {
          return;
        }
      } else if (each.family == family && !ForEachItemOf(netdevs, question, each, put)) {
        return;
      }
    }
  }
}

// Writes messages of a dump from number `first` on, as far as they fit; how
// many. `*all`: there are no more.
uint32_t PutItems(const Netdevs& netdevs, const Question& question, uint32_t first, Writer* to,
                  bool* all) {
  uint32_t number = 0, written = 0;
  *all = true;
  ForEachItem(netdevs, question, [&](auto put) {
    if (number++ < first) return true;
    *all = put(to);
    written += *all ? 1 : 0;
    return *all;
  });
  return written;
}

void PutDone(Writer* to, const Question& question) {
  to->Begin(question.header, NLMSG_DONE, NLM_F_MULTI);
  const int error = 0;
  to->Raw(&error, sizeof(error));
  (void)to->End();
}

// The answer to a question that came back. 0 bytes: there is none any more.
void PutAnswer(const Netdevs& netdevs, const Question& question, Writer* to) {
  if (question.dump()) {
    bool all;
    (void)PutItems(netdevs, question, 0, to, &all);
    return PutDone(to, question);
  }
  if (question.type() == RTM_GETROUTE) {
    bool own;
    const NetdevAddress* const found = RouteTo(netdevs, question, &own);
    if (found != nullptr) (void)PutRoute(to, question, 0, *found, false, own);
    return;
  }
  for (const NetdevAddress& each : netdevs) {
    if (each.index != question.index && strcmp(each.name, question.name) != 0) continue;
    (void)PutLink(to, question, 0, each);
    return;
  }
}

bool IsOurs(const Netdevs& netdevs, const Question& question) {
  for (const NetdevAddress& each : netdevs) {
    if (question.index != 0 ? each.index == question.index
                            : question.name[0] != '\0' && strcmp(each.name, question.name) == 0) {
      return true;
    }
  }
  return false;
}

// Whether the question is to be answered by us alone.
bool AnsweredByUs(const Netdevs& netdevs, const Question& question) {
  if (question.special) return false;
  if (question.type() == RTM_GETROUTE && !question.dump()) {
    if (!question.has_destination) return false;
    bool own;
    const NetdevAddress* const found = RouteTo(netdevs, question, &own);
    return found != nullptr &&
           !(own && found->family == AF_INET && question.destination.s6_addr[0] == 127);
  }
  if (question.type() != RTM_GETLINK && !question.dump()) return false;
  return IsOurs(netdevs, question);
}

// Whether our interfaces belong into this dump.
bool Belongs(const Question& question) {
  if (!question.dump() || question.special || question.index != 0) return false;
  return question.type() != RTM_GETROUTE || question.table == 0 || question.table == RT_TABLE_MAIN;
}

size_t RoomOf(const msghdr& message) {
  size_t room = 0;
  for (size_t i = 0; i < message.msg_iovlen; ++i) room += message.msg_iov[i].iov_len;
  return room;
}

// As recvmsg() would give `size` bytes that the kernel has sent.
ssize_t Give(const char* data, size_t size, msghdr* message, int flags) {
  size_t done = 0;
  for (size_t i = 0; i < message->msg_iovlen && done < size; ++i) {
    const iovec& part = message->msg_iov[i];
    const size_t count = part.iov_len < size - done ? part.iov_len : size - done;
    memcpy(part.iov_base, data + done, count);
    done += count;
  }
  if (message->msg_name != nullptr) {
    sockaddr_nl kernel = {};
    kernel.nl_family = AF_NETLINK;
    memcpy(message->msg_name, &kernel,
           message->msg_namelen < sizeof(kernel) ? message->msg_namelen : sizeof(kernel));
    message->msg_namelen = sizeof(kernel);
  }
  message->msg_controllen = 0;
  message->msg_flags = done < size ? MSG_TRUNC : 0;
  return static_cast<ssize_t>((flags & MSG_TRUNC) != 0 ? size : done);
}

ssize_t Receive(int fd, char* buffer, size_t room, int flags) {
  iovec part = {buffer, room};
  msghdr message = {};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  return VERBENA_NEXT(recvmsg)(fd, &message, flags);
}

// Where in a datagram the end of the dump `sequence` is; `size`: nowhere.
size_t FindDone(const char* data, size_t size, uint32_t sequence) {
  size_t at = 0;
  while (at + sizeof(nlmsghdr) <= size) {
    nlmsghdr header;
    memcpy(&header, data + at, sizeof(header));
    if (header.nlmsg_len < sizeof(header) || header.nlmsg_len > size - at) break;
    if (header.nlmsg_type == NLMSG_DONE && header.nlmsg_seq == sequence) return at;
    at += NLMSG_ALIGN(header.nlmsg_len);
  }
  return size;
}

// One datagram with what belongs into it. `buffer` has twice kMostDatagram: what
// the kernel sent, and room to compose.
ssize_t ReceiveInto(int fd, Outstanding* socket, char* buffer, msghdr* message, int flags) {
  const ssize_t got =
      Receive(fd, buffer, kMostDatagram, (flags & MSG_DONTWAIT) | MSG_PEEK | MSG_TRUNC);
  if (got < 0) return -1;
  const auto plain = [&] { return VERBENA_NEXT(recvmsg)(fd, message, flags); };
  const auto size = static_cast<size_t>(got);
  if (size > kMostDatagram || size < sizeof(nlmsghdr)) return plain();
  char* const composed = buffer + kMostDatagram;
  const bool peek = (flags & MSG_PEEK) != 0;
  const auto take = [&] { return Receive(fd, buffer, 1, MSG_DONTWAIT) >= 0; };

  nlmsghdr first;
  memcpy(&first, buffer, sizeof(first));
  constexpr size_t kEcho = NLMSG_HDRLEN + offsetof(nlmsgerr, msg);
  Question question;
  if (first.nlmsg_type == NLMSG_ERROR && size >= kEcho + sizeof(nlmsghdr) &&
      Parse(buffer + kEcho, size - kEcho, &question) && (question.header.nlmsg_type & kOurs) != 0) {
    question.header.nlmsg_pid = first.nlmsg_pid;
    const Netdevs netdevs;
    Writer writer(composed, kMostDatagram);
    PutAnswer(netdevs, question, &writer);
    if (writer.used() == 0) {  // The daemon ended meanwhile.
      nlmsgerr error = {-ENODEV, question.header};
      error.msg.nlmsg_type = question.type();
      writer.Begin(question.header, NLMSG_ERROR, 0);
      writer.Raw(&error, sizeof(error));
      (void)writer.End();
    }
    if (!peek) {
      socket->question.store(false, std::memory_order_relaxed);
      if (!take()) return -1;
    }
    return Give(composed, writer.used(), message, flags);
  }

  const uint16_t dump = socket->dump.load(std::memory_order_relaxed);
  if (dump == 0) return plain();
  const uint32_t sequence = socket->sequence.load(std::memory_order_relaxed);
  const size_t end = FindDone(buffer, size, sequence);
  if (end == size) return plain();
  const Netdevs netdevs;
  question = Question();
  question.header.nlmsg_type = dump;
  question.header.nlmsg_seq = sequence;
  memcpy(&first, buffer + end, sizeof(first));
  question.header.nlmsg_pid = first.nlmsg_pid;
  question.family = socket->family.load(std::memory_order_relaxed);
  const uint32_t told = socket->told.load(std::memory_order_relaxed);
  // All at once, before the end, if the program has room.
  bool all;
  Writer writer(composed + end, kMostDatagram - size);
  (void)PutItems(netdevs, question, told, &writer, &all);
  const size_t total = size + writer.used();
  if (all && (total <= RoomOf(*message) || peek)) {
    memcpy(composed, buffer, end);
    memcpy(composed + end + writer.used(), buffer + end, size - end);
    if (!peek) {
      socket->dump.store(0, std::memory_order_relaxed);
      if (!take()) return -1;
    }
    return Give(composed, total, message, flags);
  }
  // Piece by piece; what the kernel sent stays until then, so that the socket
  // is readable.
  Writer piece(composed, kChunk);
  const uint32_t written = PutItems(netdevs, question, told, &piece, &all);
  if (written == 0) {
    if (!peek) socket->dump.store(0, std::memory_order_relaxed);
    return plain();
  }
  if (!peek) socket->told.store(told + written, std::memory_order_relaxed);
  return Give(composed, piece.used(), message, flags);
}

// Whether another message follows in what is sent; iproute2 sends zeros behind some.
bool IsBatch(const char* bytes, size_t size, size_t first) {
  const size_t next = NLMSG_ALIGN(first);
  if (next + sizeof(nlmsghdr) > size) return false;
  uint32_t length;
  memcpy(&length, bytes + next, sizeof(length));
  return length >= sizeof(nlmsghdr);
}

}  // namespace

void NoteNetlinkRoute(int fd) {
  if (fd < 0 || fd >= kTableFds) return;
  Outstanding& socket = g_sockets[fd];
  socket.question.store(false, std::memory_order_relaxed);
  socket.dump.store(0, std::memory_order_relaxed);
  socket.is_route.store(true, std::memory_order_relaxed);
}

bool IsNetlinkRoute(int fd) {
  if (fd < 0 || fd >= kTableFds) return false;
  Outstanding& socket = g_sockets[fd];
  if (!socket.is_route.load(std::memory_order_relaxed)) return false;
  const int before = errno;
  int domain = 0, protocol = -1;
  socklen_t size = sizeof(domain);
  const bool same = syscall(SYS_getsockopt, fd, SOL_SOCKET, SO_DOMAIN, &domain, &size) == 0 &&
                    syscall(SYS_getsockopt, fd, SOL_SOCKET, SO_PROTOCOL, &protocol, &size) == 0 &&
                    domain == AF_NETLINK && protocol == NETLINK_ROUTE;
  errno = before;
  // Closed, and something else has the number.
  if (!same) socket.is_route.store(false, std::memory_order_relaxed);
  return same;
}

// Errors have to come with the whole request.
bool HidesNetlinkRouteOption(int level, int option) {
  return level == SOL_NETLINK && option == NETLINK_CAP_ACK;
}

ssize_t SendNetlinkRoute(int fd, const msghdr* message, int flags) {
  const auto plain = [&] { return VERBENA_NEXT(sendmsg)(fd, message, flags); };
  char request[kMostRequest];
  const size_t size = RoomOf(*message);
  if (size < sizeof(nlmsghdr) || size > sizeof(request)) return plain();
  size_t at = 0;
  for (size_t i = 0; i < message->msg_iovlen; ++i) {
    memcpy(request + at, message->msg_iov[i].iov_base, message->msg_iov[i].iov_len);
    at += message->msg_iov[i].iov_len;
  }
  Question question;
  if (!Parse(request, size, &question) || (question.header.nlmsg_type & kOurs) != 0 ||
      IsBatch(request, size, question.header.nlmsg_len)) {
    return plain();
  }
  Outstanding& socket = g_sockets[fd];
  if (Belongs(question)) {
    socket.family.store(question.family, std::memory_order_relaxed);
    socket.sequence.store(question.header.nlmsg_seq, std::memory_order_relaxed);
    socket.told.store(0, std::memory_order_relaxed);
    socket.dump.store(question.type(), std::memory_order_relaxed);
    return plain();
  }
  {
    const Netdevs netdevs;
    if (!AnsweredByUs(netdevs, question)) return plain();
  }
  // No dump: the kernel would look for one of that type.
  const auto marked = static_cast<uint16_t>(question.header.nlmsg_type | kOurs);
  memcpy(request + offsetof(nlmsghdr, nlmsg_type), &marked, sizeof(marked));
  socket.question.store(true, std::memory_order_relaxed);
  iovec part = {request, size};
  msghdr changed = *message;
  changed.msg_iov = &part;
  changed.msg_iovlen = 1;
  return VERBENA_NEXT(sendmsg)(fd, &changed, flags);
}

ssize_t ReceiveNetlinkRoute(int fd, msghdr* message, int flags) {
  Outstanding& socket = g_sockets[fd];
  char* buffer = nullptr;
  if (socket.question.load(std::memory_order_relaxed) ||
      socket.dump.load(std::memory_order_relaxed) != 0) {
    buffer = static_cast<char*>(malloc(2 * kMostDatagram));
  }
  if (buffer == nullptr) return VERBENA_NEXT(recvmsg)(fd, message, flags);
  const ssize_t got = ReceiveInto(fd, &socket, buffer, message, flags);
  const int error = errno;
  free(buffer);
  errno = error;
  return got;
}

}  // namespace verbena::provider
