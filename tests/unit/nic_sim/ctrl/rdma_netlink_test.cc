// SPDX-License-Identifier: Apache-2.0
//
// Answers on NETLINK_RDMA. Layouts and numbers are those of <rdma/rdma_netlink.h>.
#include "nic_sim/ctrl/rdma_netlink.h"

#include <gtest/gtest.h>
#include <linux/netlink.h>
#include <rdma/rdma_netlink.h>

#include <cerrno>
#include <cstring>
#include <map>
#include <string>

#include "tests/unit/nic_sim/ctrl/fake_hardware.h"

namespace verbena::nic {
namespace {

using Bytes = std::vector<std::byte>;
using Attributes = std::multimap<int, Bytes>;

Attributes Parse(std::span<const std::byte> bytes) {
  Attributes result;
  while (bytes.size() >= sizeof(nlattr)) {
    nlattr head;
    std::memcpy(&head, bytes.data(), sizeof(head));
    EXPECT_GE(head.nla_len, sizeof(head));
    EXPECT_LE(head.nla_len, bytes.size());
    if (head.nla_len < sizeof(head) || head.nla_len > bytes.size()) break;
    result.emplace(head.nla_type & NLA_TYPE_MASK,
                   Bytes(bytes.begin() + sizeof(head), bytes.begin() + head.nla_len));
    bytes = bytes.subspan(std::min<size_t>(NLA_ALIGN(head.nla_len), bytes.size()));
  }
  return result;
}

template <typename T>
T Value(const Attributes& attributes, int type) {
  const auto found = attributes.find(type);
  T value{};
  EXPECT_NE(found, attributes.end()) << "attribute " << type;
  if (found == attributes.end()) return value;
  EXPECT_EQ(found->second.size(), sizeof(value)) << "attribute " << type;
  std::memcpy(&value, found->second.data(), std::min(sizeof(value), found->second.size()));
  return value;
}

std::string Text(const Attributes& attributes, int type) {
  const auto found = attributes.find(type);
  if (found == attributes.end()) return "(missing)";
  return reinterpret_cast<const char*>(found->second.data());
}

nlmsghdr HeaderOf(const Bytes& message) {
  nlmsghdr header{};
  EXPECT_GE(message.size(), sizeof(header));
  std::memcpy(&header, message.data(), sizeof(header));
  EXPECT_LE(header.nlmsg_len, message.size());
  return header;
}
Attributes AttributesOf(const Bytes& message) {
  return Parse(std::span(message).subspan(sizeof(nlmsghdr)));
}
int ErrorOf(const Bytes& message) {
  EXPECT_EQ(HeaderOf(message).nlmsg_type, NLMSG_ERROR);
  int32_t error = 1;
  if (message.size() >= sizeof(nlmsghdr) + sizeof(error)) {
    std::memcpy(&error, &message[sizeof(nlmsghdr)], sizeof(error));
  }
  return error;
}

class RdmaNetlink : public ::testing::Test {
 protected:
  RdmaNetlink() { hardware_.whole_items = true; }

  static constexpr uint32_t kSequence = 77;
  static constexpr uint32_t kPortId = 4711;

  std::vector<Bytes> Ask(uint16_t command, uint16_t flags,
                         const std::vector<std::pair<uint16_t, uint32_t>>& attributes = {},
                         std::optional<uid_t> user = std::nullopt) {
    Bytes message(sizeof(nlmsghdr) + attributes.size() * 8);
    nlmsghdr header{};
    header.nlmsg_len = static_cast<uint32_t>(message.size());
    header.nlmsg_type = RDMA_NL_GET_TYPE(RDMA_NL_NLDEV, command);
    header.nlmsg_flags = flags | NLM_F_REQUEST;
    header.nlmsg_seq = kSequence;
    header.nlmsg_pid = kPortId;
    std::memcpy(message.data(), &header, sizeof(header));
    size_t at = sizeof(header);
    for (const auto& [type, value] : attributes) {
      const nlattr head = {8, type};
      std::memcpy(&message[at], &head, sizeof(head));
      std::memcpy(&message[at + 4], &value, sizeof(value));
      at += 8;
    }
    std::vector<Bytes> answer = AnswerNetlink(message, &hardware_, user);
    for (const Bytes& each : answer) {
      EXPECT_EQ(HeaderOf(each).nlmsg_seq, kSequence);
      EXPECT_EQ(HeaderOf(each).nlmsg_pid, kPortId);
      EXPECT_LE(each.size(), 4096u);
    }
    return answer;
  }

  FakeHardware hardware_;
};

TEST_F(RdmaNetlink, DumpOfDevicesListsAllAndEndsWithDone) {
  const auto answer = Ask(RDMA_NLDEV_CMD_GET, NLM_F_DUMP | NLM_F_ACK);
  ASSERT_EQ(answer.size(), 3u);
  for (uint32_t i = 0; i < 2; ++i) {
    EXPECT_EQ(HeaderOf(answer[i]).nlmsg_type, 5 << 10 | RDMA_NLDEV_CMD_GET);
    EXPECT_TRUE(HeaderOf(answer[i]).nlmsg_flags & NLM_F_MULTI);
    const Attributes attributes = AttributesOf(answer[i]);
    EXPECT_EQ(Value<uint32_t>(attributes, RDMA_NLDEV_ATTR_DEV_INDEX), i);
    EXPECT_EQ(Text(attributes, RDMA_NLDEV_ATTR_DEV_NAME), "verbena" + std::to_string(i));
    EXPECT_EQ(Value<uint32_t>(attributes, RDMA_NLDEV_ATTR_PORT_INDEX), 1u);
    EXPECT_EQ(Value<uint8_t>(attributes, RDMA_NLDEV_ATTR_DEV_NODE_TYPE), 1);
    EXPECT_EQ(Value<uint64_t>(attributes, RDMA_NLDEV_ATTR_NODE_GUID), 0u);
    EXPECT_EQ(Text(attributes, RDMA_NLDEV_ATTR_DEV_PROTOCOL), "roce");
  }
  EXPECT_EQ(HeaderOf(answer[2]).nlmsg_type, NLMSG_DONE);
}

TEST_F(RdmaNetlink, OneDeviceIsAcknowledgedIfAsked) {
  auto answer = Ask(RDMA_NLDEV_CMD_GET, NLM_F_ACK, {{RDMA_NLDEV_ATTR_DEV_INDEX, 1}});
  ASSERT_EQ(answer.size(), 2u);
  EXPECT_EQ(Text(AttributesOf(answer[0]), RDMA_NLDEV_ATTR_DEV_NAME), "verbena1");
  EXPECT_FALSE(HeaderOf(answer[0]).nlmsg_flags & NLM_F_MULTI);
  EXPECT_EQ(ErrorOf(answer[1]), 0);
  answer = Ask(RDMA_NLDEV_CMD_GET, 0, {{RDMA_NLDEV_ATTR_DEV_INDEX, 1}});
  EXPECT_EQ(answer.size(), 1u);
}

TEST_F(RdmaNetlink, ErrorsAreThoseOfTheKernel) {
  using List = std::vector<std::pair<uint16_t, uint32_t>>;
  const auto error = [&](uint16_t command, uint16_t flags, const List& attributes = {}) {
    return ErrorOf(Ask(command, flags, attributes).at(0));
  };
  EXPECT_EQ(error(RDMA_NLDEV_CMD_GET, 0, List{{RDMA_NLDEV_ATTR_DEV_INDEX, 2}}), -ENODEV);
  EXPECT_EQ(error(RDMA_NLDEV_CMD_GET, 0, List{{RDMA_NLDEV_ATTR_DEV_INDEX, 0xffffffff}}), -ENODEV);
  EXPECT_EQ(error(RDMA_NLDEV_CMD_GET, 0), -EINVAL);
  EXPECT_EQ(error(RDMA_NLDEV_CMD_PORT_GET, 0,
                  List{{RDMA_NLDEV_ATTR_DEV_INDEX, 0}, {RDMA_NLDEV_ATTR_PORT_INDEX, 2}}),
            -EINVAL);
  EXPECT_EQ(error(RDMA_NLDEV_CMD_SET, 0), -EPERM);
  EXPECT_EQ(error(RDMA_NLDEV_CMD_NEWLINK, 0), -EPERM);
  EXPECT_EQ(error(500, 0), -EOPNOTSUPP);
}

TEST_F(RdmaNetlink, PortIsActiveWithItsInterface) {
  const auto answer = Ask(RDMA_NLDEV_CMD_PORT_GET, 0,
                          {{RDMA_NLDEV_ATTR_DEV_INDEX, 1}, {RDMA_NLDEV_ATTR_PORT_INDEX, 1}});
  ASSERT_EQ(answer.size(), 1u);
  const Attributes attributes = AttributesOf(answer[0]);
  EXPECT_EQ(Value<uint32_t>(attributes, RDMA_NLDEV_ATTR_PORT_INDEX), 1u);
  EXPECT_EQ(Value<uint8_t>(attributes, RDMA_NLDEV_ATTR_PORT_STATE), 4);
  EXPECT_EQ(Value<uint8_t>(attributes, RDMA_NLDEV_ATTR_PORT_PHYS_STATE), 5);
  EXPECT_EQ(Text(attributes, RDMA_NLDEV_ATTR_NDEV_NAME), "verbena1");
  EXPECT_EQ(Value<uint32_t>(attributes, RDMA_NLDEV_ATTR_NDEV_INDEX), abi::NetdevIndex(1));
}

TEST_F(RdmaNetlink, ObjectsOfOneDeviceComeInMessagesThatFit) {
  hardware_.list_items = 1000;
  const auto answer = Ask(RDMA_NLDEV_CMD_RES_QP_GET, NLM_F_DUMP, {{RDMA_NLDEV_ATTR_DEV_INDEX, 0}});
  ASSERT_GT(answer.size(), 10u);
  uint32_t next = 0;
  for (size_t i = 0; i + 1 < answer.size(); ++i) {
    const Attributes attributes = AttributesOf(answer[i]);
    EXPECT_EQ(Text(attributes, RDMA_NLDEV_ATTR_DEV_NAME), "verbena0");
    const auto table = attributes.find(RDMA_NLDEV_ATTR_RES_QP);
    ASSERT_NE(table, attributes.end());
    for (const auto& [type, entry] : Parse(table->second)) {
      EXPECT_EQ(type, RDMA_NLDEV_ATTR_RES_QP_ENTRY);
      const Attributes qp = Parse(entry);
      EXPECT_EQ(Value<uint32_t>(qp, RDMA_NLDEV_ATTR_RES_LQPN), next++);
      EXPECT_EQ(Value<uint8_t>(qp, RDMA_NLDEV_ATTR_RES_TYPE), 2);   // RC
      EXPECT_EQ(Value<uint8_t>(qp, RDMA_NLDEV_ATTR_RES_STATE), 3);  // RTS
      EXPECT_EQ(Value<uint32_t>(qp, RDMA_NLDEV_ATTR_RES_RQPN), 9u);
      EXPECT_EQ(Value<uint32_t>(qp, RDMA_NLDEV_ATTR_RES_PID), 42u);
    }
  }
  EXPECT_EQ(next, 1000u);
  EXPECT_EQ(HeaderOf(answer.back()).nlmsg_type, NLMSG_DONE);
}

TEST_F(RdmaNetlink, OneQpByItsNumber) {
  hardware_.list_items = 5;
  auto answer = Ask(RDMA_NLDEV_CMD_RES_QP_GET, 0,
                    {{RDMA_NLDEV_ATTR_DEV_INDEX, 0}, {RDMA_NLDEV_ATTR_RES_LQPN, 3}});
  ASSERT_EQ(answer.size(), 1u);
  EXPECT_EQ(Value<uint32_t>(AttributesOf(answer[0]), RDMA_NLDEV_ATTR_RES_LQPN), 3u);
  answer = Ask(RDMA_NLDEV_CMD_RES_QP_GET, 0,
               {{RDMA_NLDEV_ATTR_DEV_INDEX, 0}, {RDMA_NLDEV_ATTR_RES_LQPN, 8}});
  EXPECT_EQ(ErrorOf(answer.at(0)), -ENOENT);
}

TEST_F(RdmaNetlink, SummaryCountsTheObjects) {
  hardware_.list_items = 5;
  const auto answer = Ask(RDMA_NLDEV_CMD_RES_GET, 0, {{RDMA_NLDEV_ATTR_DEV_INDEX, 0}});
  ASSERT_EQ(answer.size(), 1u);
  const Attributes attributes = AttributesOf(answer[0]);
  const auto table = attributes.find(RDMA_NLDEV_ATTR_RES_SUMMARY);
  ASSERT_NE(table, attributes.end());
  std::map<std::string, uint64_t> counts;
  for (const auto& [type, entry] : Parse(table->second)) {
    const Attributes one = Parse(entry);
    counts[Text(one, RDMA_NLDEV_ATTR_RES_SUMMARY_ENTRY_NAME)] =
        Value<uint64_t>(one, RDMA_NLDEV_ATTR_RES_SUMMARY_ENTRY_CURR);
  }
  EXPECT_EQ(counts["qp"], 5u);
  EXPECT_EQ(counts.count("mr"), 1u);
  EXPECT_EQ(counts["mr"], 0u);
}

TEST_F(RdmaNetlink, ObjectsAreThoseThatTheClientMaySee) {
  Ask(RDMA_NLDEV_CMD_RES_QP_GET, NLM_F_DUMP, {{RDMA_NLDEV_ATTR_DEV_INDEX, 0}}, 1234);
  EXPECT_EQ(hardware_.listed_user, uid_t{1234});
  Ask(RDMA_NLDEV_CMD_RES_QP_GET, NLM_F_DUMP, {{RDMA_NLDEV_ATTR_DEV_INDEX, 0}});
  EXPECT_EQ(hardware_.listed_user, std::nullopt);
}

TEST_F(RdmaNetlink, StatisticsAreTheHardwareCounters) {
  const auto answer = Ask(RDMA_NLDEV_CMD_STAT_GET, 0,
                          {{RDMA_NLDEV_ATTR_DEV_INDEX, 0}, {RDMA_NLDEV_ATTR_PORT_INDEX, 1}});
  ASSERT_EQ(answer.size(), 1u);
  const Attributes attributes = AttributesOf(answer[0]);
  const auto table = attributes.find(RDMA_NLDEV_ATTR_STAT_HWCOUNTERS);
  ASSERT_NE(table, attributes.end());
  const Attributes entries = Parse(table->second);
  ASSERT_EQ(entries.size(), 1u);
  const Attributes entry = Parse(entries.begin()->second);
  EXPECT_EQ(Text(entry, RDMA_NLDEV_ATTR_STAT_HWCOUNTER_ENTRY_NAME), "duplicate_request");
  EXPECT_EQ(Value<uint64_t>(entry, RDMA_NLDEV_ATTR_STAT_HWCOUNTER_ENTRY_VALUE), 6u);
}

TEST_F(RdmaNetlink, GarbageIsRefusedOrIgnored) {
  EXPECT_TRUE(AnswerNetlink({}, &hardware_, std::nullopt).empty());
  Bytes message(sizeof(nlmsghdr) + 8);
  nlmsghdr header{};
  const auto answer = [&] {
    std::memcpy(message.data(), &header, sizeof(header));
    return AnswerNetlink(message, &hardware_, std::nullopt);
  };
  header.nlmsg_len = 400;  // more than there is
  header.nlmsg_flags = NLM_F_REQUEST;
  header.nlmsg_type = RDMA_NL_GET_TYPE(RDMA_NL_NLDEV, RDMA_NLDEV_CMD_GET);
  EXPECT_TRUE(answer().empty());
  header.nlmsg_len = static_cast<uint32_t>(message.size());
  for (const int length : {0, 3, 9, 65535}) {
    const nlattr attribute = {static_cast<uint16_t>(length), RDMA_NLDEV_ATTR_DEV_INDEX};
    std::memcpy(&message[sizeof(header)], &attribute, sizeof(attribute));
    EXPECT_EQ(ErrorOf(answer().at(0)), -EINVAL) << length;
  }
  const nlattr empty = {4, RDMA_NLDEV_ATTR_DEV_INDEX};
  std::memcpy(&message[sizeof(header)], &empty, sizeof(empty));
  EXPECT_EQ(ErrorOf(answer().at(0)), -EINVAL);
  header.nlmsg_type = RDMA_NL_GET_TYPE(RDMA_NL_IWCM, 1);
  EXPECT_EQ(ErrorOf(answer().at(0)), -EOPNOTSUPP);
  header.nlmsg_flags = 0;
  EXPECT_TRUE(answer().empty());
}

}  // namespace
}  // namespace verbena::nic
