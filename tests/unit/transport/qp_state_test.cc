// SPDX-License-Identifier: Apache-2.0
//
// The whole modify_qp table, against a second copy of it that is written as
// text, as the specification prints it: every state pair, every service, every
// attribute missing or too much.
#include "transport/qp_state.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <map>
#include <optional>
#include <sstream>
#include <string>
#include <tuple>

namespace verbena::transport {
namespace {

constexpr const char* kStates[] = {"RESET", "INIT", "RTR", "RTS", "SQD", "SQE", "ERR"};
constexpr QpType kTypes[] = {QpType::kRc,        QpType::kUc,      QpType::kUd,
                             QpType::kRawPacket, QpType::kXrcSend, QpType::kXrcRecv};

// from to service: required | optional. STATE is left out. `-`: nothing.
constexpr const char* kTable = R"(
RESET INIT RC:  PKEY PORT ACCESS | -
RESET INIT UC:  PKEY PORT ACCESS | -
RESET INIT UD:  PKEY PORT QKEY | -
RESET INIT RAW: PORT | -
RESET INIT XS:  PKEY PORT ACCESS | -
RESET INIT XR:  PKEY PORT ACCESS | -
INIT INIT RC:  - | PKEY PORT ACCESS
INIT INIT UC:  - | PKEY PORT ACCESS
INIT INIT UD:  - | PKEY PORT QKEY
INIT INIT RAW: - | -
INIT INIT XS:  - | PKEY PORT ACCESS
INIT INIT XR:  - | PKEY PORT ACCESS
INIT RTR RC:  AV MTU DQPN RQPSN DESTRD MINRNR | ALT ACCESS PKEY
INIT RTR UC:  AV MTU DQPN RQPSN | ALT ACCESS PKEY
INIT RTR UD:  - | PKEY QKEY
INIT RTR RAW: - | -
INIT RTR XS:  AV MTU DQPN RQPSN | DESTRD MINRNR ALT ACCESS PKEY
INIT RTR XR:  AV MTU DQPN RQPSN DESTRD MINRNR | ALT ACCESS PKEY
RTR RTS RC:  TIMEOUT RETRY RNR SQPSN QPRD | CUR ALT ACCESS MINRNR MIG
RTR RTS UC:  SQPSN | CUR ALT ACCESS MIG
RTR RTS UD:  SQPSN | CUR QKEY
RTR RTS RAW: - | -
RTR RTS XS:  TIMEOUT RETRY RNR SQPSN QPRD | CUR ALT ACCESS MIG
RTR RTS XR:  - | TIMEOUT RETRY RNR SQPSN QPRD CUR ALT ACCESS MINRNR MIG
RTS RTS RC:  - | CUR ACCESS ALT MIG MINRNR
RTS RTS UC:  - | CUR ACCESS ALT MIG
RTS RTS UD:  - | CUR QKEY
RTS RTS RAW: - | -
RTS RTS XS:  - | CUR ACCESS ALT MIG
RTS RTS XR:  - | CUR ACCESS ALT MIG MINRNR
RTS SQD RC:  - | NOTIFY
RTS SQD UC:  - | NOTIFY
RTS SQD UD:  - | NOTIFY
RTS SQD RAW: - | -
RTS SQD XS:  - | NOTIFY
RTS SQD XR:  - | NOTIFY
SQD SQD RC:  - | AV PORT TIMEOUT RETRY RNR QPRD DESTRD ALT ACCESS PKEY MINRNR MIG
SQD SQD UC:  - | AV ALT ACCESS PKEY MIG
SQD SQD UD:  - | PKEY QKEY
SQD SQD RAW: - | -
SQD SQD XS:  - | AV PORT TIMEOUT RETRY RNR QPRD ALT ACCESS PKEY MIG
SQD SQD XR:  - | AV PORT TIMEOUT DESTRD ALT ACCESS PKEY MINRNR MIG
SQD RTS RC:  - | CUR ALT ACCESS MINRNR MIG
SQD RTS UC:  - | CUR ALT ACCESS MIG
SQD RTS UD:  - | CUR QKEY
SQD RTS RAW: - | -
SQD RTS XS:  - | CUR ALT ACCESS MIG
SQD RTS XR:  - | CUR ALT ACCESS MINRNR MIG
SQE RTS UC:  - | CUR ACCESS
SQE RTS UD:  - | CUR QKEY
SQE RTS RAW: - | -
)";

// Bit numbers of enum ibv_qp_attr_mask.
const std::map<std::string, int> kBits = {
    {"CUR", 1},    {"NOTIFY", 2},  {"ACCESS", 3}, {"PKEY", 4},    {"PORT", 5},
    {"QKEY", 6},   {"AV", 7},      {"MTU", 8},    {"TIMEOUT", 9}, {"RETRY", 10},
    {"RNR", 11},   {"RQPSN", 12},  {"QPRD", 13},  {"ALT", 14},    {"MINRNR", 15},
    {"SQPSN", 16}, {"DESTRD", 17}, {"MIG", 18},   {"CAP", 19},    {"DQPN", 20}};

struct Row {
  uint32_t required = 0;
  uint32_t optional = 0;
};

using Key = std::tuple<std::string, std::string, std::string>;

std::map<Key, Row> ParseTable() {
  std::map<Key, Row> table;
  std::istringstream lines(kTable);
  std::string line;
  while (std::getline(lines, line)) {
    std::istringstream words(line);
    std::string from, to, service, word;
    if (!(words >> from >> to >> service)) continue;
    service.pop_back();
    Row row;
    uint32_t* into = &row.required;
    while (words >> word) {
      if (word == "|") {
        into = &row.optional;
      } else if (word != "-") {
        *into |= 1u << kBits.at(word);
      }
    }
    table[{from, to, service}] = row;
  }
  return table;
}

const char* ServiceName(QpType type) {
  switch (type) {
    case QpType::kRc:
      return "RC";
    case QpType::kUc:
      return "UC";
    case QpType::kUd:
      return "UD";
    case QpType::kRawPacket:
      return "RAW";
    case QpType::kXrcSend:
      return "XS";
    case QpType::kXrcRecv:
      return "XR";
  }
  return "";
}

std::optional<Row> Expected(const std::map<Key, Row>& table, QpType type, int from, int to) {
  if (to == 0 || to == 6) return Row{};  // RESET and ERR
  const auto found = table.find({kStates[from], kStates[to], ServiceName(type)});
  if (found == table.end()) return std::nullopt;
  return found->second;
}

TEST(QpStateTest, EveryTransitionOfEveryService) {
  const auto table = ParseTable();
  ASSERT_EQ(table.size(), 51u);
  for (QpType type : kTypes) {
    for (int from = 0; from < 7; ++from) {
      for (int to = 0; to < 7; ++to) {
        SCOPED_TRACE(std::string(ServiceName(type)) + " " + kStates[from] + "->" + kStates[to]);
        const auto row = Expected(table, type, from, to);
        const auto allowed = [&](uint32_t mask) {
          return IsModifyAllowed(type, static_cast<QpState>(from), static_cast<QpState>(to), mask);
        };
        const uint32_t required = row.has_value() ? row->required : 0;
        const uint32_t optional = row.has_value() ? row->optional : 0;
        EXPECT_EQ(allowed(1 | required), row.has_value());
        EXPECT_EQ(allowed(1 | required | optional), row.has_value());
        if (!row.has_value()) continue;
        for (int bit = 1; bit <= 20; ++bit) {
          const uint32_t attribute = 1u << bit;
          if ((required & attribute) != 0) {
            EXPECT_FALSE(allowed(1 | (required & ~attribute))) << "without bit " << bit;
          } else {
            EXPECT_EQ(allowed(1 | required | attribute), (optional & attribute) != 0)
                << "with bit " << bit;
          }
        }
      }
    }
  }
}

TEST(QpStateTest, StateBitItselfIsNotNeeded) {
  EXPECT_TRUE(IsModifyAllowed(QpType::kRc, QpState::kRts, QpState::kRts, kQpAttrMinRnrTimer));
  EXPECT_FALSE(IsModifyAllowed(QpType::kRc, QpState::kRtr, QpState::kRtr, kQpAttrMinRnrTimer));
}

TEST(QpStateTest, BitsOfLaterExtensionsAreIgnored) {
  for (int bit = 21; bit < 32; ++bit) {
    EXPECT_TRUE(IsModifyAllowed(
        QpType::kRc, QpState::kReset, QpState::kInit,
        kQpAttrState | kQpAttrPkeyIndex | kQpAttrPort | kQpAttrAccessFlags | (1u << bit)));
  }
}

TEST(QpStateTest, NamesAreTheSpecifications) {
  for (int state = 0; state < 7; ++state) {
    EXPECT_STREQ(QpStateName(static_cast<QpState>(state)), kStates[state]);
  }
  EXPECT_STREQ(QpStateName(static_cast<QpState>(99)), "UNKNOWN");
}

}  // namespace
}  // namespace verbena::transport
