// SPDX-License-Identifier: Apache-2.0
//
// A connection manager for tests of what lies around it: ids, and events that
// come when LISTEN asks for `backlog` of them. No connections.
#pragma once

#include <rdma/rdma_user_cm.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <deque>
#include <map>
#include <string>
#include <vector>

#include "nic_sim/ctrl/cm_service.h"
#include "nic_sim/supervisor/seqpacket.h"

namespace verbena::nic {

class FakeCm final : public CmService {
 public:
  FakeCm() : wake_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {}

  CmFileId OpenFile(const CmClient& client) override {
    if (refuse_files) return 0;
    last_client = client;
    files_[++last_file_];
    return last_file_;
  }

  void CloseFile(CmFileId file) override {
    files_.erase(file);
    std::erase_if(ids_, [file](const auto& entry) { return entry.second.file == file; });
  }

  bool PollNotification(CmNotification* notification) override {
    if (news_.empty()) return false;
    *notification = news_.front();
    news_.pop_front();
    return true;
  }
  int notification_fd() const override { return wake_.get(); }

  CmReply Write(CmFileId file, std::span<const std::byte> bytes) override {
    rdma_ucm_cmd_hdr header;
    std::memcpy(&header, bytes.data(), sizeof(header));
    last_write.assign(bytes.begin(), bytes.end());
    const std::span<const std::byte> payload = bytes.subspan(sizeof(header));
    switch (header.cmd) {
      case RDMA_USER_CM_CMD_CREATE_ID:
        return CreateId(file, As<rdma_ucm_create_id>(payload));
      case RDMA_USER_CM_CMD_DESTROY_ID:
        return DestroyId(file, As<rdma_ucm_destroy_id>(payload));
      case RDMA_USER_CM_CMD_LISTEN: {
        const auto request = As<rdma_ucm_listen>(payload);
        if (!Owns(file, request.id)) return {ENOENT, {}};
        Queue(request.id, static_cast<uint32_t>(request.backlog));
        return {};
      }
      case RDMA_USER_CM_CMD_GET_EVENT:
        return GetEvent(file);
      case RDMA_USER_CM_CMD_MIGRATE_ID:
        return Migrate(file, As<rdma_ucm_migrate_id>(payload));
      case RDMA_USER_CM_CMD_SET_OPTION:
        return Owns(file, As<rdma_ucm_set_option>(payload).id) ? CmReply{} : CmReply{ENOENT, {}};
      case RDMA_USER_CM_CMD_QUERY: {  // how many files are open
        rdma_ucm_query_path_resp response{};
        response.num_paths = static_cast<uint32_t>(files_.size());
        return Response(response);
      }
      default:
        return {EINVAL, {}};
    }
  }

  // As packets do: with the hardware's lock, from any thread.
  void QueueFromElsewhere(uint32_t id, uint32_t count) {
    Queue(id, count);
    const uint64_t one = 1;
    [[maybe_unused]] const ssize_t ignored = write(wake_.get(), &one, sizeof(one));
  }
  size_t file_count() const { return files_.size(); }
  size_t id_count() const { return ids_.size(); }

  bool refuse_files = false;
  CmClient last_client;
  std::vector<std::byte> last_write;

 private:
  struct Id {
    CmFileId file = 0;
    uint64_t uid = 0;
    uint32_t reported = 0;
  };

  template <typename T>
  static T As(std::span<const std::byte> payload) {
    T value{};
    std::memcpy(&value, payload.data(), std::min(sizeof(value), payload.size()));
    return value;
  }
  template <typename T>
  static CmReply Response(const T& value) {
    CmReply reply;
    reply.response.resize(sizeof(value));
    std::memcpy(reply.response.data(), &value, sizeof(value));
    return reply;
  }

  bool Owns(CmFileId file, uint32_t id) const {
    const auto found = ids_.find(id);
    return found != ids_.end() && found->second.file == file;
  }

  void Queue(uint32_t id, uint32_t count) {
    const CmFileId file = ids_.at(id).file;
    for (uint32_t i = 0; i < count; ++i) files_[file].push_back(id);
    if (count > 0) news_.push_back({file, static_cast<int32_t>(count)});
  }

  uint32_t Drop(CmFileId file, uint32_t id) {
    const uint32_t dropped = static_cast<uint32_t>(std::erase(files_[file], id));
    if (dropped > 0) news_.push_back({file, -static_cast<int32_t>(dropped)});
    return dropped;
  }

  CmReply CreateId(CmFileId file, const rdma_ucm_create_id& request) {
    ids_[++last_id_] = {file, request.uid, 0};
    return Response(rdma_ucm_create_id_resp{last_id_});
  }

  CmReply DestroyId(CmFileId file, const rdma_ucm_destroy_id& request) {
    if (!Owns(file, request.id)) return {ENOENT, {}};
    Drop(file, request.id);
    const uint32_t reported = ids_.at(request.id).reported;
    ids_.erase(request.id);
    return Response(rdma_ucm_destroy_id_resp{reported});
  }

  CmReply GetEvent(CmFileId file) {
    std::deque<uint32_t>& queue = files_[file];
    if (queue.empty()) return {EAGAIN, {}};
    rdma_ucm_event_resp event{};
    event.id = queue.front();
    event.uid = ids_.at(event.id).uid;
    event.event = 14;
    event.status = ++serial_;
    queue.pop_front();
    ++ids_.at(event.id).reported;
    return Response(event);
  }

  CmReply Migrate(CmFileId file, const rdma_ucm_migrate_id& request) {
    if (!Owns(request.fd, request.id)) return {EINVAL, {}};
    const uint32_t moved = Drop(request.fd, request.id);
    ids_.at(request.id).file = file;
    Queue(request.id, moved);
    return Response(rdma_ucm_migrate_resp{ids_.at(request.id).reported});
  }

  UniqueFd wake_;
  CmFileId last_file_ = 0;
  uint32_t last_id_ = 100;
  uint32_t serial_ = 0;
  std::map<CmFileId, std::deque<uint32_t>> files_;  // ids, one per event
  std::map<uint32_t, Id> ids_;
  std::deque<CmNotification> news_;
};

}  // namespace verbena::nic
