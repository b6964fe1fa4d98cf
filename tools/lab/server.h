// SPDX-License-Identifier: Apache-2.0
//
// The lab page's web server: loopback only, below a path that holds a random token. Requests are
// refused whose Host is not ours (a name of somebody else's that leads to 127.0.0.1) or that
// another site's page makes (Origin, Sec-Fetch-Site). The page's Content-Security-Policy allows
// nothing from elsewhere.
#pragma once

#include <memory>
#include <string>

#include "tools/lab/feed.h"
#include "tools/lab/transfers.h"

namespace verbena::tools {

class LabServer {
 public:
  // `folder`: of the example programs. Everything outlives the server.
  LabServer(std::string socket, Feed* feed, Transfers* transfers);
  ~LabServer();
  LabServer(const LabServer&) = delete;
  LabServer& operator=(const LabServer&) = delete;

  // 0: any free port. Empty = it listens at url(), else a sentence.
  std::string Listen(int port);
  const std::string& url() const { return url_; }
  // Serves until Stop, which any thread may call.
  void Serve();
  void Stop();

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
  std::string url_;
};

}  // namespace verbena::tools
