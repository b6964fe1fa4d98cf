// SPDX-License-Identifier: Apache-2.0
//
// What tools/chaos runs besides stock programs; each role is one process.
//   pair SEED SECONDS DEVICE DEVICE        connections with random traffic, every byte checked
//   requester|responder SEED ROUNDS DEVICE FOLDER   the same between two processes, which meet
//                                          through files in FOLDER
//   phoenix SEED SECONDS DEVICE            as pair; opens the device anew when it has died
//   churn SEED SECONDS DEVICE              objects of all kinds come and go
//   kinds SEED SECONDS DEVICE DEVICE       every other transport and object (chaos_kinds.cc)
//   objects DEVICE                         holds one of each until it is killed
#include <signal.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <exception>
#include <fstream>
#include <stdexcept>
#include <string>
#include <thread>

#include "tests/endurance/chaos_roles.h"
#include "tests/verbs/traffic.h"
#include "tests/verbs/verbs_support.h"

namespace verbena::testing {
namespace {

TrafficOptions RandomTraffic(Random& random) {
  TrafficOptions options;
  options.seed = random.Next() >> 8;
  options.rounds = 1 + static_cast<int>(random.Below(4));
  options.max_message = random.OneIn(3) ? 65536 : 5000;
  options.max_inline = 256;
  return options;
}

PathOptions RandomPath(Random& random) {
  PathOptions path;
  path.mtu = static_cast<ibv_mtu>(IBV_MTU_256 + random.Below(5));
  path.timeout = static_cast<uint8_t>(13 + random.Below(3));
  return path;
}

// One connection with some rounds of traffic.
void Connection(Random& random, const std::string& from, const std::string& to) {
  const int gid = static_cast<int>(random.Below(2));
  RcEnd a(TrafficEnd(from, gid)), b(TrafficEnd(to, gid));
  ConnectPair(a, b, RandomPath(random));
  const std::string problem = RunTraffic(a, b, RandomTraffic(random));
  if (!problem.empty()) throw std::runtime_error(problem);
}

VERBENA_ROLE(pair) {
  Random random(std::stoull(arguments.at(0)));
  const auto end = After(arguments.at(1));
  int before = -1;
  int connections = 0;
  try {
    do {
      Connection(random, arguments.at(2), arguments.at(3));
      // The first one leaves what libibverbs keeps for good.
      if (before < 0) before = OpenDescriptors();
      CheckDescriptors(before);
      ++connections;
    } while (Clock::now() < end);
  } catch (const std::exception& error) {
    return Report(error);
  }
  printf("data right: %d connections\n", connections);
  return 0;
}

VERBENA_ROLE(phoenix) {
  Random random(std::stoull(arguments.at(0)));
  const auto end = After(arguments.at(1));
  int before = -1;
  int connections = 0;
  int deaths = 0;
  while (Clock::now() < end) {
    try {
      Connection(random, arguments.at(2), arguments.at(2));
      ++connections;
      if (before < 0) before = OpenDescriptors();
      CheckDescriptors(before);
    } catch (const std::exception& error) {
      if (IsFinding(error)) return Report(error);
      printf("lost: %s\n", error.what());
      ++deaths;
      std::this_thread::sleep_for(std::chrono::milliseconds(20));
    }
  }
  printf("data right: %d connections, %d lost\n", connections, deaths);
  return 0;
}

// Files that appear whole.
void Publish(const std::string& path, const std::string& text) {
  std::ofstream(path + ".new") << text << "\n";
  Require(rename((path + ".new").c_str(), path.c_str()) == 0, "rename");
}

std::string Await(const std::string& path) {
  const auto end = Clock::now() + std::chrono::seconds(60);
  while (Clock::now() < end) {
    std::ifstream file(path);
    std::string text;
    if (std::getline(file, text)) return text;
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
  throw std::runtime_error("the peer did not come");
}

// The last ACK may be lost, and a QP that is gone cannot repeat it.
void LeaveTogether(const std::string& folder, const std::string& self, const std::string& peer) {
  Publish(folder + "/" + self + "-done", "");
  Await(folder + "/" + peer + "-done");
}

TrafficOptions SharedTraffic(const std::vector<std::string>& arguments) {
  TrafficOptions options;
  options.seed = std::stoull(arguments.at(0));
  options.rounds = std::stoi(arguments.at(1));
  options.max_message = options.seed % 3 == 0 ? 65536 : 5000;
  options.max_inline = 256;
  return options;
}

VERBENA_ROLE(responder) {
  try {
    const TrafficOptions options = SharedTraffic(arguments);
    const std::string folder = arguments.at(3);
    RcEnd end(TrafficEnd(arguments.at(2)));
    TrafficResponder answers(end, options);
    Publish(folder + "/responder", end.address().Text() + " " + answers.remote().Text());
    const PeerAddress peer = PeerAddress::Parse(Await(folder + "/requester"));
    Require(end.ToInit() == 0, "INIT");
    answers.Prepare();  // Before the first packet can come: it clears the memory.
    Require(end.ToRtr(peer) == 0, "RTR");
    Require(end.ToRts() == 0, "RTS");
    Publish(folder + "/ready", "");
    answers.Run();
    LeaveTogether(folder, "responder", "requester");
  } catch (const std::exception& error) {
    return Report(error);
  }
  printf("data right\n");
  return 0;
}

VERBENA_ROLE(requester) {
  try {
    const TrafficOptions options = SharedTraffic(arguments);
    const std::string folder = arguments.at(3);
    RcEnd end(TrafficEnd(arguments.at(2)));
    Publish(folder + "/requester", end.address().Text());
    const std::string text = Await(folder + "/responder");
    const size_t blank = text.find(' ');
    Require(blank != std::string::npos, "the responder's line");
    end.Connect(PeerAddress::Parse(text.substr(0, blank)));
    TrafficRequester asks(end, RemoteMemory::Parse(text.substr(blank + 1)), options);
    Await(folder + "/ready");
    asks.Run();
    LeaveTogether(folder, "requester", "responder");
  } catch (const std::exception& error) {
    return Report(error);
  }
  printf("data right\n");
  return 0;
}

// A context with some objects; most are destroyed in the right order, some are left to exit.
// The CQs are shared: one that was moved to ERR may have left flushed WRs there.
ibv_wc PollOwn(const RcEnd& end, ibv_cq* cq) {
  ibv_wc wc = PollOne(cq);
  while (wc.qp_num != end.qp()->qp_num) wc = PollOne(cq);
  return wc;
}

void Churn(Random& random, const std::string& device) {
  EndOptions options;
  options.device = device;
  options.channel = random.OneIn(2);
  options.send_wr = 1 + static_cast<uint32_t>(random.Below(200));
  options.recv_wr = 1 + static_cast<uint32_t>(random.Below(200));
  // Room for all of a round: an overrun would end the QPs.
  options.cqe = 64 + static_cast<int>(random.Below(1000));
  RcEnd first(options);
  std::vector<std::unique_ptr<RcEnd>> ends;
  std::vector<std::unique_ptr<Memory>> memories;
  for (int i = 0; i < 30; ++i) {
    switch (random.Below(6)) {
      case 0:
        ends.push_back(std::make_unique<RcEnd>(first, options));
        break;
      case 1:
        memories.push_back(std::make_unique<Memory>(first.pd(), 1 + random.Below(1 << 20)));
        break;
      case 2:
        if (!ends.empty()) ends.erase(ends.begin() + static_cast<long>(random.Below(ends.size())));
        break;
      case 3:
        if (!memories.empty()) memories.pop_back();
        break;
      case 4:
        if (!ends.empty()) {
          RcEnd& end = *ends[random.Below(ends.size())];
          Require(end.ToState(IBV_QPS_RESET) == 0, "RESET");
          end.Connect(end.address());
          Require(end.PostRecv(1) == 0 && end.PostSend(SendWr(2)) == 0, "post");
          if (random.OneIn(2)) {
            const ibv_wc wc = PollOwn(end, end.send_cq());
            if (wc.status != IBV_WC_SUCCESS) throw std::runtime_error(Describe(wc));
            PollOwn(end, end.recv_cq());
          }
        }
        break;
      default:
        if (!ends.empty()) {
          Require(ends[random.Below(ends.size())]->ToState(IBV_QPS_ERR) == 0, "ERR");
        }
    }
  }
}

VERBENA_ROLE(churn) {
  Random random(std::stoull(arguments.at(0)));
  const auto end = After(arguments.at(1));
  int before = -1;
  try {
    do {
      Churn(random, arguments.at(2));
      if (before < 0) before = OpenDescriptors();
      CheckDescriptors(before);
    } while (Clock::now() < end);
    if (random.OneIn(2)) {
      RcEnd left((EndOptions()));
      Memory memory(left.pd(), 100000);
      left.Connect(left.address());
      printf("data right\n");
      fflush(stdout);
      _exit(0);  // The daemon has to clear away.
    }
  } catch (const std::exception& error) {
    return Report(error);
  }
  printf("data right\n");
  return 0;
}

}  // namespace
}  // namespace verbena::testing
