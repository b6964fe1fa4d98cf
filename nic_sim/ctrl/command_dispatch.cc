// SPDX-License-Identifier: Apache-2.0
#include "nic_sim/ctrl/command_dispatch.h"

#include <fcntl.h>

#include <cerrno>
#include <cstring>
#include <type_traits>

namespace verbena::nic {
namespace {

// A command on its way.
struct Call {
  Context* context;
  std::vector<UniqueFd> fds;
  CommandResult* result;
};

int TakeSegments(int error, const SegmentFds& segments, CommandResult* result) {
  for (const int fd : segments) result->fds.emplace_back(fd);
  return error;
}

int AllocPd(Call& call, const abi::HandleRequest&, abi::HandleReply* reply) {
  return call.context->AllocPd(&reply->handle);
}
int DeallocPd(Call& call, const abi::HandleRequest& request, abi::HandleReply*) {
  return call.context->DeallocPd(request.handle);
}
int RegMr(Call& call, const abi::RegMrRequest& request, abi::RegMrReply* reply) {
  return call.context->RegMr(request, reply);
}
int DeregMr(Call& call, const abi::HandleRequest& request, abi::HandleReply*) {
  return call.context->DeregMr(request.handle);
}

int ReregMr(Call& call, const abi::ReregMrRequest& request, abi::HandleReply*) {
  return call.context->ReregMr(request);
}
int AllocNullMr(Call& call, const abi::HandleRequest& request, abi::RegMrReply* reply) {
  return call.context->AllocNullMr(request.handle, reply);
}
int QueryMr(Call& call, const abi::HandleRequest& request, abi::QueryMrReply* reply) {
  return call.context->QueryMr(request.handle, reply);
}
int AllocMw(Call& call, const abi::AllocMwRequest& request, abi::HandleReply* reply) {
  return call.context->AllocMw(request, &reply->handle);
}
int DeallocMw(Call& call, const abi::HandleRequest& request, abi::HandleReply*) {
  return call.context->DeallocMw(request.handle);
}
int AllocDm(Call& call, const abi::AllocDmRequest& request, abi::DmReply* reply) {
  if (call.fds.size() != 1) return EINVAL;
  reply->length = request.length;
  return call.context->AllocDm(request, call.fds[0].release(), &reply->handle);
}
int FreeDm(Call& call, const abi::HandleRequest& request, abi::HandleReply*) {
  return call.context->FreeDm(request.handle);
}
int ImportPd(Call& call, const abi::ImportRequest& request, abi::HandleReply* reply) {
  reply->handle = request.handle;
  return call.context->ImportPd(request);
}
int ImportMr(Call& call, const abi::ImportRequest& request, abi::QueryMrReply* reply) {
  return call.context->ImportMr(request, reply);
}
int ImportDm(Call& call, const abi::ImportRequest& request, abi::DmReply* reply) {
  int fd = -1;
  reply->handle = request.handle;
  const int error = call.context->ImportDm(request, &reply->length, &fd);
  if (error == 0) call.result->fds.emplace_back(fd);
  return error;
}

int CreateCq(Call& call, const abi::CreateCqRequest& request, abi::CreateCqReply* reply) {
  if (request.has_channel > 1 || call.fds.size() != request.has_channel) {
    return EINVAL;
  }
  UniqueFd channel;
  UniqueFd duplicate;
  if (request.has_channel == 1) {
    channel = OwnPipeWriteEnd(call.fds[0].get());
    if (!channel.valid()) return EINVAL;
    duplicate.reset(fcntl(channel.get(), F_DUPFD_CLOEXEC, 3));
    if (!duplicate.valid()) return ENOMEM;
  }
  SegmentFds segments;
  const int error = TakeSegments(
      call.context->CreateCq(request, channel.release(), reply, &segments), segments, call.result);
  if (error == 0 && duplicate.valid()) {
    call.result->cq_change = CommandResult::CqChange::kChannelAdded;
    call.result->cq = reply->handle;
    call.result->cq_user_handle = request.user_handle;
    call.result->channel = std::move(duplicate);
  }
  return error;
}

int DestroyCq(Call& call, const abi::HandleRequest& request, abi::DestroyReply* reply) {
  const int error = call.context->DestroyCq(request.handle, reply);
  if (error == 0) {
    call.result->cq_change = CommandResult::CqChange::kRemoved;
    call.result->cq = request.handle;
  }
  return error;
}

int ResizeCq(Call& call, const abi::ResizeCqRequest& request, abi::CreateCqReply* reply) {
  SegmentFds segments;
  return TakeSegments(call.context->ResizeCq(request, reply, &segments), segments, call.result);
}
int FinishCqResize(Call& call, const abi::HandleRequest& request, abi::HandleReply*) {
  return call.context->FinishCqResize(request.handle);
}
int ModifyCq(Call& call, const abi::ModifyCqRequest& request, abi::HandleReply*) {
  return call.context->ModifyCq(request);
}

int CreateQp(Call& call, const abi::CreateQpRequest& request, abi::CreateQpReply* reply) {
  SegmentFds segments;
  return TakeSegments(call.context->CreateQp(request, reply, &segments), segments, call.result);
}
int ModifyQp(Call& call, const abi::ModifyQpRequest& request, abi::ModifyQpReply* reply) {
  return call.context->ModifyQp(request, reply);
}
int QueryQp(Call& call, const abi::HandleRequest& request, abi::QueryQpReply* reply) {
  return call.context->QueryQp(request.handle, reply);
}
int DestroyQp(Call& call, const abi::HandleRequest& request, abi::DestroyReply* reply) {
  return call.context->DestroyQp(request.handle, reply);
}
int CreateSrq(Call& call, const abi::CreateSrqRequest& request, abi::CreateSrqReply* reply) {
  SegmentFds segments;
  return TakeSegments(call.context->CreateSrq(request, reply, &segments), segments, call.result);
}
int ModifySrq(Call& call, const abi::ModifySrqRequest& request, abi::ModifySrqReply* reply) {
  SegmentFds segments;
  return TakeSegments(call.context->ModifySrq(request, reply, &segments), segments, call.result);
}
int FinishSrqResize(Call& call, const abi::FinishSrqResizeRequest& request, abi::HandleReply*) {
  return call.context->FinishSrqResize(request);
}
int QuerySrq(Call& call, const abi::HandleRequest& request, abi::QuerySrqReply* reply) {
  return call.context->QuerySrq(request.handle, reply);
}
int DestroySrq(Call& call, const abi::HandleRequest& request, abi::DestroyReply* reply) {
  return call.context->DestroySrq(request.handle, reply);
}
int AttachMcast(Call& call, const abi::McastRequest& request, abi::HandleReply*) {
  return call.context->AttachMcast(request);
}
int DetachMcast(Call& call, const abi::McastRequest& request, abi::HandleReply*) {
  return call.context->DetachMcast(request);
}
int CreateFlow(Call& call, const abi::CreateFlowRequest& request, abi::HandleReply* reply) {
  return call.context->CreateFlow(request, &reply->handle);
}
int DestroyFlow(Call& call, const abi::HandleRequest& request, abi::HandleReply*) {
  return call.context->DestroyFlow(request.handle);
}
int CreateCounters(Call& call, const abi::HandleRequest&, abi::HandleReply* reply) {
  return call.context->CreateCounters(&reply->handle);
}
int DestroyCounters(Call& call, const abi::HandleRequest& request, abi::HandleReply*) {
  return call.context->DestroyCounters(request.handle);
}
int ReadCounters(Call& call, const abi::HandleRequest& request, abi::ReadCountersReply* reply) {
  return call.context->ReadCounters(request.handle, reply);
}
int CreateRss(Call& call, const abi::CreateRssRequest& request, abi::HandleReply* reply) {
  return call.context->CreateRss(request, &reply->handle);
}
int DestroyRss(Call& call, const abi::HandleRequest& request, abi::HandleReply*) {
  return call.context->DestroyRss(request.handle);
}
int LimitQpRate(Call& call, const abi::LimitQpRateRequest& request, abi::HandleReply*) {
  return call.context->LimitQpRate(request);
}
int OpenXrcd(Call& call, const abi::OpenXrcdRequest& request, abi::HandleReply* reply) {
  if (request.has_file > 1 || call.fds.size() != request.has_file) return EINVAL;
  const int fd = request.has_file == 1 ? call.fds[0].get() : -1;
  return call.context->OpenXrcd(request, fd, &reply->handle);
}
int CloseXrcd(Call& call, const abi::HandleRequest& request, abi::HandleReply*) {
  return call.context->CloseXrcd(request.handle);
}
int OpenQp(Call& call, const abi::OpenQpRequest& request, abi::OpenQpReply* reply) {
  return call.context->OpenQp(request, reply);
}
int CreateAh(Call& call, const abi::CreateAhRequest& request, abi::HandleReply* reply) {
  return call.context->CreateAh(request, &reply->handle);
}
int DestroyAh(Call& call, const abi::HandleRequest& request, abi::HandleReply*) {
  return call.context->DestroyAh(request.handle);
}
int QueryPort(Call& call, const abi::HandleRequest& request, abi::QueryPortReply* reply) {
  return call.context->QueryPort(request.handle, reply);
}

int GetSegment(Call& call, const abi::HandleRequest& request, abi::HandleReply* reply) {
  SegmentFds segments;
  reply->handle = request.handle;
  return TakeSegments(call.context->GetSegment(request.handle, &segments), segments, call.result);
}

int CheckFault(Call& call, const abi::CheckFaultRequest& request, abi::HandleReply*) {
  return call.context->CheckFault(request);
}

// One row of the command table: the function with its sizes and the bytes around it.
struct Command {
  size_t request_bytes;
  void (*run)(Call& call, std::span<const std::byte> request);
};

template <auto kFunction>
struct RowOf;
template <typename Request, typename Reply, int (*kFunction)(Call&, const Request&, Reply*)>
struct RowOf<kFunction> {
  static_assert(std::is_trivially_copyable_v<Request> && std::is_trivially_copyable_v<Reply>);
  static void Run(Call& call, std::span<const std::byte> bytes) {
    Request request;
    std::memcpy(&request, bytes.data(), sizeof(request));
    Reply reply{};
    call.result->error = kFunction(call, request, &reply);
    // What a failed command left behind is nobody's business.
    if (call.result->error != 0) reply = Reply{};
    reply.header = {request.header.sequence, call.result->error};
    call.result->reply.resize(sizeof(reply));
    std::memcpy(call.result->reply.data(), &reply, sizeof(reply));
  }
  static constexpr Command kCommand = {sizeof(Request), &Run};
};

const Command* FindCommand(uint16_t op) {
  switch (op) {
    case abi::kCmdAllocPd:
      return &RowOf<&AllocPd>::kCommand;
    case abi::kCmdDeallocPd:
      return &RowOf<&DeallocPd>::kCommand;
    case abi::kCmdRegMr:
      return &RowOf<&RegMr>::kCommand;
    case abi::kCmdDeregMr:
      return &RowOf<&DeregMr>::kCommand;
    case abi::kCmdCreateCq:
      return &RowOf<&CreateCq>::kCommand;
    case abi::kCmdDestroyCq:
      return &RowOf<&DestroyCq>::kCommand;
    case abi::kCmdCreateQp:
      return &RowOf<&CreateQp>::kCommand;
    case abi::kCmdModifyQp:
      return &RowOf<&ModifyQp>::kCommand;
    case abi::kCmdQueryQp:
      return &RowOf<&QueryQp>::kCommand;
    case abi::kCmdDestroyQp:
      return &RowOf<&DestroyQp>::kCommand;
    case abi::kCmdCreateAh:
      return &RowOf<&CreateAh>::kCommand;
    case abi::kCmdDestroyAh:
      return &RowOf<&DestroyAh>::kCommand;
    case abi::kCmdQueryPort:
      return &RowOf<&QueryPort>::kCommand;
    case abi::kCmdGetSegment:
      return &RowOf<&GetSegment>::kCommand;
    case abi::kCmdCreateSrq:
      return &RowOf<&CreateSrq>::kCommand;
    case abi::kCmdModifySrq:
      return &RowOf<&ModifySrq>::kCommand;
    case abi::kCmdFinishSrqResize:
      return &RowOf<&FinishSrqResize>::kCommand;
    case abi::kCmdQuerySrq:
      return &RowOf<&QuerySrq>::kCommand;
    case abi::kCmdDestroySrq:
      return &RowOf<&DestroySrq>::kCommand;
    case abi::kCmdAttachMcast:
      return &RowOf<&AttachMcast>::kCommand;
    case abi::kCmdDetachMcast:
      return &RowOf<&DetachMcast>::kCommand;
    case abi::kCmdCreateFlow:
      return &RowOf<&CreateFlow>::kCommand;
    case abi::kCmdDestroyFlow:
      return &RowOf<&DestroyFlow>::kCommand;
    case abi::kCmdCreateCounters:
      return &RowOf<&CreateCounters>::kCommand;
    case abi::kCmdDestroyCounters:
      return &RowOf<&DestroyCounters>::kCommand;
    case abi::kCmdReadCounters:
      return &RowOf<&ReadCounters>::kCommand;
    case abi::kCmdCreateRss:
      return &RowOf<&CreateRss>::kCommand;
    case abi::kCmdDestroyRss:
      return &RowOf<&DestroyRss>::kCommand;
    case abi::kCmdLimitQpRate:
      return &RowOf<&LimitQpRate>::kCommand;
    case abi::kCmdOpenXrcd:
      return &RowOf<&OpenXrcd>::kCommand;
    case abi::kCmdCloseXrcd:
      return &RowOf<&CloseXrcd>::kCommand;
    case abi::kCmdOpenQp:
      return &RowOf<&OpenQp>::kCommand;
    case abi::kCmdReregMr:
      return &RowOf<&ReregMr>::kCommand;
    case abi::kCmdAllocNullMr:
      return &RowOf<&AllocNullMr>::kCommand;
    case abi::kCmdQueryMr:
      return &RowOf<&QueryMr>::kCommand;
    case abi::kCmdAllocMw:
      return &RowOf<&AllocMw>::kCommand;
    case abi::kCmdDeallocMw:
      return &RowOf<&DeallocMw>::kCommand;
    case abi::kCmdAllocDm:
      return &RowOf<&AllocDm>::kCommand;
    case abi::kCmdFreeDm:
      return &RowOf<&FreeDm>::kCommand;
    case abi::kCmdImportPd:
      return &RowOf<&ImportPd>::kCommand;
    case abi::kCmdImportMr:
      return &RowOf<&ImportMr>::kCommand;
    case abi::kCmdImportDm:
      return &RowOf<&ImportDm>::kCommand;
    case abi::kCmdResizeCq:
      return &RowOf<&ResizeCq>::kCommand;
    case abi::kCmdFinishCqResize:
      return &RowOf<&FinishCqResize>::kCommand;
    case abi::kCmdModifyCq:
      return &RowOf<&ModifyCq>::kCommand;
    case abi::kCmdCheckFault:
      return &RowOf<&CheckFault>::kCommand;
    default:
      return nullptr;
  }
}

CommandResult Refuse(uint32_t sequence, int error) {
  CommandResult result;
  result.error = error;
  const abi::ReplyHeader header = {sequence, error};
  result.reply.resize(sizeof(header));
  std::memcpy(result.reply.data(), &header, sizeof(header));
  return result;
}

}  // namespace

CommandResult DispatchCommand(Context* context, std::span<const std::byte> request, bool truncated,
                              std::vector<UniqueFd> fds) {
  abi::CommandHeader header{};
  std::memcpy(&header, request.data(), std::min(request.size(), sizeof(header)));
  if (request.size() < sizeof(header) || truncated || header.size != request.size()) {
    return Refuse(header.sequence, EINVAL);
  }
  const Command* command = FindCommand(header.op);
  if (command == nullptr) return Refuse(header.sequence, EOPNOTSUPP);
  if (request.size() != command->request_bytes) return Refuse(header.sequence, EINVAL);
  if (const int error = context->InjectedError(header.op); error != 0) [[unlikely]] {
    context->TraceCommand(header.op, error);
    return Refuse(header.sequence, error);
  }
  CommandResult result;
  Call call = {context, std::move(fds), &result};
  command->run(call, request);
  if (result.error != 0) result.fds.clear();
  context->TraceCommand(header.op, result.error);
  return result;
}

}  // namespace verbena::nic
