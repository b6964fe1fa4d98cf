// SPDX-License-Identifier: Apache-2.0
//
// metrics: the counters in the text format of Prometheus, once on stdout or
// over HTTP. A process of its own, so that no daemon listens on TCP; one request
// at a time, each bounded in size and time.
#include <arpa/inet.h>
#include <fmt/format.h>
#include <netinet/in.h>
#include <poll.h>
#include <signal.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <map>

#include "tools/verbena_cli/commands.h"
#include "tools/verbena_cli/metrics.h"
#include "tools/verbena_cli/text_output.h"

namespace verbena::tools {
namespace {

using Clock = std::chrono::steady_clock;
constexpr std::chrono::milliseconds kRequestLimit(2000);
constexpr size_t kMostRequest = 8192;

// Of a label's value.
std::string Escaped(const std::string& text) {
  std::string out;
  for (const char c : text) {
    if (c == '\\' || c == '"') out += '\\';
    out += c == '\n' ? ' ' : c;
  }
  return out;
}

bool IsName(const std::string& name) {
  return !name.empty() && name.find_first_not_of(
                              "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_") ==
                              std::string::npos;
}

volatile sig_atomic_t g_stop = 0;
void Stop(int) { g_stop = 1; }

bool WaitFor(int fd, short events, Clock::time_point until) {
  const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(until - Clock::now());
  pollfd descriptor = {fd, events, 0};
  return left.count() > 0 && poll(&descriptor, 1, static_cast<int>(left.count())) > 0;
}

std::string Response(const InstanceOptions& options, const std::string& request) {
  const auto answer = [](const char* status, const char* type, const std::string& body) {
    return fmt::format(
        "HTTP/1.1 {}\r\nContent-Type: {}\r\nContent-Length: {}\r\nConnection: close\r\n\r\n{}",
        status, type, body.size(), body);
  };
  const size_t end = request.find(' ');
  const size_t path_end = end == std::string::npos ? end : request.find(' ', end + 1);
  if (path_end == std::string::npos)
    return answer("400 Bad Request", "text/plain", "bad request\n");
  const std::string method = request.substr(0, end);
  const std::string path = request.substr(end + 1, path_end - end - 1);
  if (method != "GET") return answer("405 Method Not Allowed", "text/plain", "GET only\n");
  if (path != "/metrics") return answer("404 Not Found", "text/plain", "see /metrics\n");
  const Reply reply = Ask(options, {{"op", "counters"}});
  if (!reply.ok()) return answer("503 Service Unavailable", "text/plain", "no daemon answers\n");
  return answer("200 OK", "text/plain; version=0.0.4; charset=utf-8", MetricsText(reply.json));
}

void Serve(int client, const InstanceOptions& options) {
  const Clock::time_point until = Clock::now() + kRequestLimit;
  std::string request;
  while (request.find("\r\n\r\n") == std::string::npos && request.size() < kMostRequest &&
         WaitFor(client, POLLIN, until)) {
    char buffer[2048];
    const ssize_t length = recv(client, buffer, sizeof(buffer), 0);
    if (length <= 0) break;
    request.append(buffer, static_cast<size_t>(length));
  }
  const std::string response = Response(options, request);
  for (size_t sent = 0; sent < response.size() && WaitFor(client, POLLOUT, until);) {
    const ssize_t length =
        send(client, response.data() + sent, response.size() - sent, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (length <= 0) break;
    sent += static_cast<size_t>(length);
  }
}

// "127.0.0.1:9464" or "9464". Empty = good, else a sentence.
std::string ParseAddress(const std::string& text, sockaddr_in* address) {
  const size_t colon = text.rfind(':');
  const std::string host = colon == std::string::npos ? "127.0.0.1" : text.substr(0, colon);
  const std::string port = colon == std::string::npos ? text : text.substr(colon + 1);
  char* end = nullptr;
  const long number = std::strtol(port.c_str(), &end, 10);
  address->sin_family = AF_INET;
  if (port.empty() || *end != '\0' || number < 0 || number > 65535 ||
      inet_pton(AF_INET, host.c_str(), &address->sin_addr) != 1) {
    return fmt::format("'{}' is not IPV4:PORT", text);
  }
  address->sin_port = htons(static_cast<uint16_t>(number));
  // There is no login: who can connect reads all.
  if ((ntohl(address->sin_addr.s_addr) >> 24) != 127) {
    return fmt::format("'{}' is not a loopback address; put a proxy with a login before it", host);
  }
  return {};
}

}  // namespace

std::string MetricsText(const Json& counters) {
  // Prometheus wants all samples of a metric together.
  std::map<std::string, std::string> metrics;
  for (const auto& device : ObjectField(counters, "devices").items()) {
    for (const char* group : {"counters", "hw_counters", "wire"}) {
      for (const auto& counter : ObjectField(device.value(), group).items()) {
        if (!counter.value().is_number() || !IsName(counter.key())) continue;
        const bool is_gauge = counter.key() == "neighbours";
        std::string& text = metrics[counter.key()];
        const std::string name =
            fmt::format("verbena_{}{}", counter.key(), is_gauge ? "" : "_total");
        if (text.empty())
          text = fmt::format("# TYPE {} {}\n", name, is_gauge ? "gauge" : "counter");
        text += fmt::format("{}{{device=\"{}\",port=\"1\"}} {}\n", name, Escaped(device.key()),
                            Printable(counter.value()));
      }
    }
    for (const auto& drop : ObjectField(device.value(), "drops").items()) {
      if (!drop.value().is_number()) continue;
      std::string& text = metrics["~drops"];
      if (text.empty()) text = "# TYPE verbena_dropped_packets_total counter\n";
      text += fmt::format(
          "verbena_dropped_packets_total{{device=\"{}\",port=\"1\",reason=\"{}\"}} {}\n",
          Escaped(device.key()), Escaped(drop.key()), Printable(drop.value()));
    }
  }
  std::string text;
  for (const auto& [name, lines] : metrics) text += lines;
  return text;
}

int Metrics(const InstanceOptions& options, const std::string& listen_on) {
  if (listen_on.empty()) {
    const Reply reply = Ask(options, {{"op", "counters"}});
    if (!reply.ok()) return 1;
    Print(stdout, "{}", MetricsText(reply.json));
    return 0;
  }
  sockaddr_in address = {};
  if (const std::string problem = ParseAddress(listen_on, &address); !problem.empty()) {
    PrintError(problem);
    return 1;
  }
  const int server = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  const int on = 1;
  if (server >= 0) setsockopt(server, SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on));
  socklen_t length = sizeof(address);
  if (server < 0 || bind(server, reinterpret_cast<sockaddr*>(&address), length) != 0 ||
      listen(server, 16) != 0 ||
      getsockname(server, reinterpret_cast<sockaddr*>(&address), &length) != 0) {
    PrintError(fmt::format("cannot listen on {}: {}", listen_on, std::strerror(errno)));
    if (server >= 0) close(server);
    return 1;
  }
  struct sigaction action = {};
  action.sa_handler = &Stop;  // without SA_RESTART: accept ends
  sigaction(SIGINT, &action, nullptr);
  sigaction(SIGTERM, &action, nullptr);
  char host[INET_ADDRSTRLEN] = "";
  inet_ntop(AF_INET, &address.sin_addr, host, sizeof(host));
  Print(stdout, "http://{}:{}/metrics\n", host, ntohs(address.sin_port));
  std::fflush(stdout);
  while (g_stop == 0) {
    const int client = accept4(server, nullptr, nullptr, SOCK_CLOEXEC);
    if (client < 0) continue;
    Serve(client, options);
    close(client);
  }
  close(server);
  return 0;
}

}  // namespace verbena::tools
