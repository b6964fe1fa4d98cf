// SPDX-License-Identifier: Apache-2.0
//
// XrcDomain: an XRC domain: the SRQs that requests may name and the receiving
// QPs (targets) that find them. Processes of one user share it by a file, or
// one has it alone. A target lives as long as anybody has it open.
//
// Thread: under the shard's lock.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <list>
#include <map>
#include <memory>
#include <optional>
#include <vector>

#include "nic_sim/abi/shared_memory.h"
#include "nic_sim/qp/qp.h"
#include "nic_sim/queues/shared_receive_queue.h"
#include "transport/types.h"

namespace verbena::nic {

struct FileKey {
  dev_t device = 0;
  ino_t inode = 0;
  bool operator==(const FileKey&) const = default;
};

// A context's view of a target.
struct XrcOpener {
  class Sink {
   public:
    virtual ~Sink() = default;
    virtual void OnXrcQpEvent(Qp& target, XrcOpener& opener, transport::AsyncEventType type) = 0;
  };
  Sink* sink = nullptr;
  uint64_t user_handle = 0;
  uint32_t async_events = 0;  // written for this opener
  uint32_t xrcd = 0;          // handle of the domain in the context
};

// A receiving QP with what a context's page has for others.
class XrcTarget final : public QpEventSink {
 public:
  const AddressHandle* FindAh(uint32_t) const override { return nullptr; }
  void OnQpEvent(Qp& target, transport::AsyncEventType type) override {
    for (XrcOpener* opener : openers) opener->sink->OnXrcQpEvent(target, *opener, type);
  }
  void OnCqOverrun(CompletionQueue&) override {}  // it has none
  void OnInjectedEvent(Qp& target, CompletionQueue*, uint8_t type) override {
    OnQpEvent(target, transport::AsyncEventType{type});
  }

  std::unique_ptr<Qp> qp;
  std::vector<XrcOpener*> openers;
  abi::QpRecord record{};
};

class XrcDomain {
 public:
  explicit XrcDomain(std::optional<FileKey> file) : file_(file) {}
  XrcDomain(const XrcDomain&) = delete;
  XrcDomain& operator=(const XrcDomain&) = delete;

  const std::optional<FileKey>& file() const { return file_; }

  SharedReceiveQueue* Find(transport::SrqNumber number) const {
    const auto found = srqs_.find(number.value());
    return found == srqs_.end() ? nullptr : found->second;
  }
  void Add(SharedReceiveQueue* srq) { srqs_[srq->config().number] = srq; }
  void Remove(SharedReceiveQueue* srq) { srqs_.erase(srq->config().number); }

  XrcTarget* FindTarget(uint32_t qpn) {
    for (XrcTarget& target : targets) {
      if (target.qp->qpn().value() == qpn) return &target;
    }
    return nullptr;
  }

  uint32_t handles = 0;  // of contexts; the last one takes the domain with it
  std::list<XrcTarget> targets;

 private:
  std::optional<FileKey> file_;
  std::map<uint32_t, SharedReceiveQueue*> srqs_;
};

}  // namespace verbena::nic
