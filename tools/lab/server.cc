// SPDX-License-Identifier: Apache-2.0
#include "tools/lab/server.h"

#include <fmt/format.h>
#include <httplib.h>
#include <sys/random.h>

#include <array>
#include <cerrno>
#include <cstring>
#include <mutex>
#include <utility>

#include "tools/lab/assets.h"

namespace verbena::tools {
namespace {

constexpr size_t kTokenBytes = 16;
constexpr size_t kMostBodyBytes = 16 * 1024;
constexpr size_t kThreads = 16;
// Each holds a thread; the rest is for commands.
constexpr int kMostPages = 10;
constexpr int64_t kMostSteps = 1000;

constexpr char kPolicy[] =
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'";

std::string RandomToken() {
  std::array<unsigned char, kTokenBytes> bytes;
  if (getrandom(bytes.data(), bytes.size(), 0) != static_cast<ssize_t>(bytes.size())) return {};
  std::string text;
  for (const unsigned char byte : bytes) text += fmt::format("{:02x}", byte);
  return text;
}

// Takes the same time wherever the first difference is.
bool SameText(std::string_view a, std::string_view b) {
  if (a.size() != b.size()) return false;
  unsigned difference = 0;
  for (size_t i = 0; i < a.size(); ++i) difference |= static_cast<unsigned char>(a[i] ^ b[i]);
  return difference == 0;
}

void Answer(httplib::Response& response, int status, const Json& body) {
  response.status = status;
  response.set_content(Dump(body), "application/json");
}
void Refuse(httplib::Response& response, int status, const std::string& sentence) {
  Answer(response, status, {{"error", sentence}});
}

uint32_t Bounded(const Json& body, const char* key, uint32_t fallback) {
  const int64_t value = IntegerField(body, key, fallback);
  return value < 0 || value > UINT32_MAX ? UINT32_MAX : static_cast<uint32_t>(value);
}

}  // namespace

class LabServer::Impl {
 public:
  Impl(std::string socket, Feed* feed, Transfers* transfers)
      : socket_(std::move(socket)), feed_(feed), transfers_(transfers), token_(RandomToken()) {
    server_.new_task_queue = [] { return new httplib::ThreadPool(kThreads); };
    // Not SO_REUSEPORT, httplib's default: another program could share the port.
    server_.set_socket_options([](socket_t fd) {
      const int yes = 1;
      setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &yes, sizeof(yes));
    });
    server_.set_tcp_nodelay(true);
    server_.set_payload_max_length(kMostBodyBytes);
    server_.set_default_headers({{"Content-Security-Policy", kPolicy},
                                 {"Referrer-Policy", "no-referrer"},
                                 {"X-Content-Type-Options", "nosniff"},
                                 {"Cross-Origin-Resource-Policy", "same-origin"},
                                 {"Cache-Control", "no-store"}});
    server_.set_pre_routing_handler([this](const auto& request, auto& response) {
      return Admit(request, response) ? httplib::Server::HandlerResponse::Unhandled
                                      : httplib::Server::HandlerResponse::Handled;
    });
    AddRoutes();
  }

  std::string Listen(int port, std::string* url) {
    if (token_.empty()) return "no random numbers";
    if (port == 0) {
      port = server_.bind_to_any_port("127.0.0.1");
      if (port <= 0) return fmt::format("cannot listen at 127.0.0.1: {}", std::strerror(errno));
    } else if (!server_.bind_to_port("127.0.0.1", port)) {
      return fmt::format("cannot listen at 127.0.0.1:{}: {}", port, std::strerror(errno));
    }
    hosts_ = {fmt::format("127.0.0.1:{}", port), fmt::format("localhost:{}", port)};
    *url = fmt::format("http://{}/{}/", hosts_[0], token_);
    return {};
  }
  void Serve() { server_.listen_after_bind(); }
  void Stop() { server_.stop(); }

 private:
  using Request = httplib::Request;
  using Response = httplib::Response;

  bool Admit(const Request& request, Response& response) {
    const std::string host = request.get_header_value("Host");
    const bool known_host = host == hosts_[0] || host == hosts_[1];
    if (!known_host || request.get_header_value_count("Host") != 1) {
      Refuse(response, 403, "wrong Host");
      return false;
    }
    if (request.has_header("Origin") && request.get_header_value("Origin") != "http://" + host) {
      Refuse(response, 403, "another site's page may not ask");
      return false;
    }
    const std::string site = request.get_header_value("Sec-Fetch-Site");
    const bool typed = site == "none" && request.method == "GET";
    if (!site.empty() && site != "same-origin" && !typed) {
      Refuse(response, 403, "another site's page may not ask");
      return false;
    }
    const std::string& path = request.path;
    if (path.size() < token_.size() + 2 ||
        !SameText(std::string_view(path).substr(0, token_.size() + 2), "/" + token_ + "/")) {
      Refuse(response, 404, "not found");
      return false;
    }
    return true;
  }

  void AddRoutes() {
    const auto file = [this](const char* name, std::string_view content, const char* type) {
      server_.Get("/" + token_ + "/" + name, [content, type](const Request&, Response& response) {
        response.set_content(content.data(), content.size(), type);
      });
    };
    file("", kLabPage, "text/html; charset=utf-8");
    file("app.js", kLabScript, "text/javascript; charset=utf-8");
    file("style.css", kLabStyle, "text/css; charset=utf-8");
    // As text: nothing in it may run here.
    file("standalone.txt", kStandalonePage, "text/plain; charset=utf-8");
    server_.Get("/" + token_ + "/events",
                [this](const Request&, Response& response) { Watch(response); });
    Command("start", [this](const Json& body) { return StartTransfer(body); });
    Command("stop", [this](const Json&) {
      transfers_->Stop();
      return Json{{"ok", true}};
    });
    Command("fault_add", [this](const Json& body) {
      return Ask({{"op", "fault_add"}, {"rule", TextField(body, "rule")}});
    });
    Command("fault_clear", [this](const Json& body) {
      Json request = {{"op", "fault_clear"}};
      if (const int64_t id = IntegerField(body, "id"); id > 0) request["id"] = id;
      return Ask(request);
    });
    Command("step", [this](const Json& body) {
      const int64_t count = std::clamp<int64_t>(IntegerField(body, "count", 1), 1, kMostSteps);
      return Ask({{"op", "fault_step"}, {"count", count}});
    });
    Command("release", [this](const Json&) { return Ask({{"op", "fault_release"}}); });
  }

  template <typename Run>
  void Command(const char* name, Run run) {
    server_.Post(fmt::format("/{}/api/{}", token_, name),
                 [this, run](const Request& request, Response& response) {
                   // A form of another site cannot have this type without being asked for.
                   if (request.get_header_value("Content-Type") != "application/json") {
                     return Refuse(response, 415, "application/json is expected");
                   }
                   const Json body = Json::parse(request.body, nullptr, /*allow_exceptions=*/false);
                   if (!body.is_object()) return Refuse(response, 400, "a JSON object is expected");
                   const Json answer = run(body);
                   Answer(response, answer.contains("error") ? 409 : 200, answer);
                   feed_->Hurry();
                 });
  }

  void Watch(Response& response) {
    if (feed_->viewers() >= kMostPages) return Refuse(response, 503, "too many pages watch");
    auto viewer = std::make_shared<Feed::Viewer>(feed_);
    response.set_chunked_content_provider("text/event-stream",
                                          [viewer](size_t, httplib::DataSink& sink) {
                                            std::string text;
                                            if (!viewer->Next(&text)) return false;
                                            return sink.write(text.data(), text.size());
                                          });
  }

  Json StartTransfer(const Json& body) {
    std::vector<TransferRequest> requests;
    const std::string kind = TextField(body, "kind");
    const TransferRequest request = {.kind = kind,
                                     .size = Bounded(body, "size", 64),
                                     .count = Bounded(body, "count", 10),
                                     .pause_ms = Bounded(body, "pause_ms", 0)};
    const std::string problem = transfers_->Start({request}, /*repeat=*/false);
    if (!problem.empty()) return {{"error", problem}};
    return {{"ok", true}};
  }

  // A request of its own connection: commands come seldom, and the feed's is the feed's.
  Json Ask(const Json& request) {
    ControlClient client;
    if (const std::string problem = client.Connect(socket_); !problem.empty()) {
      return {{"error", problem}};
    }
    const Reply reply = client.Request(request);
    if (!reply.ok()) return {{"error", reply.error}};
    return reply.json;
  }

  const std::string socket_;
  Feed* const feed_;
  Transfers* const transfers_;
  const std::string token_;
  std::array<std::string, 2> hosts_;
  httplib::Server server_;
};

LabServer::LabServer(std::string socket, Feed* feed, Transfers* transfers)
    : impl_(std::make_unique<Impl>(std::move(socket), feed, transfers)) {}
LabServer::~LabServer() = default;

std::string LabServer::Listen(int port) { return impl_->Listen(port, &url_); }
void LabServer::Serve() { impl_->Serve(); }
void LabServer::Stop() { impl_->Stop(); }

}  // namespace verbena::tools
