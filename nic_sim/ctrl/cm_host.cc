// SPDX-License-Identifier: Apache-2.0
#include "nic_sim/ctrl/cm_host.h"

#include <ifaddrs.h>
#include <netinet/in.h>
#include <sys/eventfd.h>
#include <sys/random.h>
#include <sys/timerfd.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <fstream>
#include <string>
#include <utility>

namespace verbena::nic {
namespace {

using transport::Gid;
using transport::MadPacket;
using transport::Time;

// Addresses of the machine may come and go.
constexpr std::chrono::seconds kHostAddressesKept(2);

constexpr size_t kMadsInARow = 256;

// CLOCK_MONOTONIC, so that the timerfd understands it.
Time Now() {
  timespec now = {};
  clock_gettime(CLOCK_MONOTONIC, &now);
  return Time::FromNanoseconds(now.tv_sec * 1'000'000'000 + now.tv_nsec);
}

std::vector<std::byte> BytesOf(const Gid& gid) { return {gid.bytes().begin(), gid.bytes().end()}; }

}  // namespace

CmHost::CmHost(std::vector<CmNic> nics, CmMadPort* port, DeviceFaults* faults)
    : nics_(std::move(nics)),
      port_(port),
      faults_(faults),
      wake_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)),
      timer_(timerfd_create(CLOCK_MONOTONIC, TFD_CLOEXEC | TFD_NONBLOCK)) {
  CmPlatform& platform = *this;
  agent_ = std::make_unique<CmAgent>(nics_, platform);
}

CmHost::~CmHost() = default;

CmFileId CmHost::OpenFile(const CmClient& client) {
  const CmFileId file = agent_->OpenFile(client);
  std::ifstream comm("/proc/" + std::to_string(client.pid) + "/comm");
  if (file != 0) std::getline(comm, apps_[file]);
  return file;
}

FaultSubject CmHost::SubjectOf(CmFileId file, std::optional<uint32_t> nic) {
  return {.nic = nic.value_or(FaultSubject::kNoNic), .app = apps_[file], .qpn = 0, .nth_qp = 0};
}

std::optional<int32_t> CmHost::InjectedStatus(uint32_t file, uint8_t event,
                                              std::optional<uint32_t> nic) {
  if (faults_ == nullptr || !faults_->wants(DeviceFaults::kAtCm)) return std::nullopt;
  return faults_->OnCm(event, SubjectOf(file, nic), Now());
}

void CmHost::CloseFile(CmFileId file) {
  agent_->CloseFile(file, Now());
  apps_.erase(file);
  Drain();
}

CmReply CmHost::Write(CmFileId file, std::span<const std::byte> bytes) {
  uint32_t command = 0;  // first in rdma_ucm_cmd_hdr
  if (faults_ != nullptr && faults_->wants(DeviceFaults::kAtCm) && bytes.size() >= sizeof command) {
    std::memcpy(&command, bytes.data(), sizeof command);
    int error = 0;
    if (command <= 0xff) {
      error = faults_->OnVerb(static_cast<uint16_t>(kVerbRdmaCm + command),
                              SubjectOf(file, agent_->NicOf(file, bytes)), Now());
    }
    if (error != 0) return {.error = error, .response = {}};
  }
  CmReply reply = agent_->Write(file, bytes, Now());
  Drain();
  return reply;
}

bool CmHost::PollNotification(CmNotification* notification) {
  return agent_->PollNotification(notification);
}

void CmHost::RemoveNic(uint32_t nic) {
  agent_->RemoveNic(nic, Now());
  Drain();
  Wake();
}

void CmHost::RestoreNic(uint32_t nic) { agent_->RestoreNic(nic); }

void CmHost::AnnounceAddressChange(uint32_t nic) {
  agent_->AnnounceAddressChange(nic, Now());
  Wake();
}

void CmHost::SetGids(uint32_t nic, std::vector<CmNic::Address> gids) {
  if (nic < nics_.size()) nics_[nic].gids = gids;
  agent_->SetGids(nic, std::move(gids));
}

void CmHost::HandlePackets() {
  uint64_t count = 0;
  [[maybe_unused]] const ssize_t ignored = read(packet_fd(), &count, sizeof(count));
  Drain();
}

void CmHost::HandleTimer() {
  uint64_t count = 0;
  [[maybe_unused]] const ssize_t ignored = read(timer_.get(), &count, sizeof(count));
  armed_ = Time::Never();
  agent_->HandleTimeout(Now());
  Drain();
  Wake();
}

void CmHost::Drain() {
  MadPacket mad;
  size_t received = 0;
  while (true) {
    if (agent_->PollMad(&mad)) {
      Send(mad);
    } else if (!local_.empty()) {
      mad = local_.front();
      local_.pop_front();
      agent_->HandleMad(mad, Now());
    } else if (port_ != nullptr && received < kMadsInARow && port_->PollMad(&mad)) {
      ++received;
      agent_->HandleMad(mad, Now());
    } else {
      break;
    }
  }
  if (received == kMadsInARow) {
    // Others want their turn, too.
    const uint64_t one = 1;
    [[maybe_unused]] const ssize_t ignored = write(packet_fd(), &one, sizeof(one));
  }
  const Time next = agent_->next_timeout();
  if (next == armed_) return;
  armed_ = next;
  itimerspec when = {};
  if (!next.IsNever()) {
    const int64_t at = std::max<int64_t>(next.ns(), 1);  // zero would disarm it
    when.it_value.tv_sec = at / 1'000'000'000;
    when.it_value.tv_nsec = at % 1'000'000'000;
  }
  timerfd_settime(timer_.get(), TFD_TIMER_ABSTIME, &when, nullptr);
}

void CmHost::Send(const MadPacket& mad) {
  if (port_ != nullptr) return port_->SendMad(mad);
  for (uint32_t nic = 0; nic < nics_.size(); ++nic) {
    const auto& gids = nics_[nic].gids;
    const bool here = std::any_of(gids.begin(), gids.end(), [&](const CmNic::Address& address) {
      return address.gid == mad.destination;
    });
    if (!here) continue;
    local_.push_back(mad);
    local_.back().nic = nic;
    return;
  }
}

void CmHost::Wake() {
  const uint64_t one = 1;
  [[maybe_unused]] const ssize_t ignored = write(wake_.get(), &one, sizeof(one));
}

bool CmHost::IsHostAddress(const Gid& address) {
  const auto now = std::chrono::steady_clock::now();
  if (now >= host_addresses_until_) {
    host_addresses_.clear();
    host_addresses_until_ = now + kHostAddressesKept;
    ifaddrs* list = nullptr;
    if (getifaddrs(&list) == 0) {
      for (const ifaddrs* each = list; each != nullptr; each = each->ifa_next) {
        if (each->ifa_addr == nullptr) continue;
        if (each->ifa_addr->sa_family == AF_INET) {
          const auto* v4 = reinterpret_cast<const sockaddr_in*>(each->ifa_addr);
          host_addresses_.insert(BytesOf(Gid::FromIpv4(ntohl(v4->sin_addr.s_addr))));
        } else if (each->ifa_addr->sa_family == AF_INET6) {
          const auto* v6 = reinterpret_cast<const sockaddr_in6*>(each->ifa_addr);
          const std::byte* bytes = reinterpret_cast<const std::byte*>(&v6->sin6_addr);
          host_addresses_.emplace(bytes, bytes + sizeof(v6->sin6_addr));
        }
      }
      freeifaddrs(list);
    }
  }
  return host_addresses_.contains(BytesOf(address));
}

CmPlatform::Reach CmHost::Resolve(uint32_t nic, const Gid& destination) {
  return port_ != nullptr ? port_->Resolve(nic, destination) : Reach::kUnreachable;
}

uint32_t CmHost::Random() {
  uint32_t value = 0;
  if (getrandom(&value, sizeof(value), 0) != sizeof(value)) {
    value = static_cast<uint32_t>(Now().ns() * 0x9e3779b97f4a7c15);
  }
  return value;
}

void CmHost::JoinGroup(uint32_t nic, const Gid& group) {
  if (port_ != nullptr) port_->JoinGroup(nic, group);
}

void CmHost::LeaveGroup(uint32_t nic, const Gid& group) {
  if (port_ != nullptr) port_->LeaveGroup(nic, group);
}

}  // namespace verbena::nic
