// SPDX-License-Identifier: Apache-2.0
//
// The client against a server that follows docs/CONTROL.md, and against servers that do not.
#include "tools/verbena_cli/control_client.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <chrono>
#include <memory>
#include <thread>

#include "tests/unit/tools/fake_control_server.h"
#include "tests/unit/tools/run_program.h"

namespace verbena::tools {
namespace {

using Kind = Reply::Kind;
using Milliseconds = ControlClient::Milliseconds;

class ControlClientTest : public ::testing::Test {
 protected:
  ~ControlClientTest() override { StopServer(); }

  void StartServer(FakeHandler handler) {
    server_ = std::make_unique<FakeControlServer>(path_);
    thread_ = std::thread([this, handler] { server_->Serve(handler, 20); });
  }
  void StopServer() {
    if (server_) server_->Stop();
    if (thread_.joinable()) thread_.join();
    server_.reset();
  }
  // One request to a server that answers anything with these messages.
  Reply AnswerOf(const std::vector<std::string>& messages, bool close_connection = false) {
    StopServer();
    StartServer([=](const std::string&, int) { return FakeAnswer{messages, close_connection}; });
    ControlClient client;
    EXPECT_EQ(client.Connect(path_), "");
    return client.Request({{"op", "status"}}, -1, Milliseconds(500));
  }

  ScratchFolder scratch_;
  std::string path_ = scratch_ / "s.sock";
  std::unique_ptr<FakeControlServer> server_;
  std::thread thread_;
};

TEST_F(ControlClientTest, SaysHelloAndSendsOneJsonObject) {
  std::string seen;
  StartServer([&seen](const std::string& request, int) {
    seen = request;
    return FakeAnswer{{R"(L{"ok":true})"}};
  });
  ControlClient client;
  ASSERT_EQ(client.Connect(path_), "");
  const Reply reply = client.Request({{"op", "list"}, {"what", "qp"}});
  ASSERT_TRUE(reply.ok()) << reply.error;
  EXPECT_TRUE(server_->hello_seen());
  EXPECT_EQ(seen, R"({"op":"list","what":"qp"})");
}

TEST_F(ControlClientTest, JoinsThePiecesOfALongReply) {
  Json items = Json::array();
  for (int i = 0; i < 20'000; ++i) items.push_back({{"qpn", i}, {"state", "RTS"}});
  const std::string text = Json({{"items", items}}).dump();
  std::vector<std::string> messages;
  constexpr size_t kPiece = 50'000;
  for (size_t at = 0; at < text.size(); at += kPiece) {
    messages.push_back((at + kPiece < text.size() ? "M" : "L") + text.substr(at, kPiece));
  }
  ASSERT_GT(messages.size(), 5U);
  const Reply reply = AnswerOf(messages);
  ASSERT_TRUE(reply.ok()) << reply.error;
  EXPECT_EQ(ArrayField(reply.json, "items").size(), 20'000U);
}

TEST_F(ControlClientTest, GivesTheDaemonsErrorAsText) {
  const Reply reply = AnswerOf({R"(L{"error":"unknown key 'nht'"})"});
  EXPECT_EQ(reply.kind, Kind::kRefused);
  EXPECT_EQ(reply.error, "unknown key 'nht'");
}

TEST_F(ControlClientTest, OddRepliesAreErrorsAndNotCrashes) {
  EXPECT_EQ(AnswerOf({"L"}).kind, Kind::kBadReply);
  EXPECT_EQ(AnswerOf({"L{\"a\":"}).kind, Kind::kBadReply);
  EXPECT_EQ(AnswerOf({"L[1,2]"}).kind, Kind::kBadReply);
  EXPECT_EQ(AnswerOf({"Lnull"}).kind, Kind::kBadReply);
  EXPECT_EQ(AnswerOf({"X{}"}).kind, Kind::kBadReply);
  EXPECT_EQ(AnswerOf({"L{\"a\":\"\xff\xfe\"}"}).kind, Kind::kBadReply);
  EXPECT_EQ(AnswerOf({"L" + std::string(100'000, '[')}).kind, Kind::kBadReply);
  EXPECT_EQ(AnswerOf({R"(L{"error":{"a":[1]}})"}).kind, Kind::kRefused);
  EXPECT_TRUE(AnswerOf({"M", "M{", "L}"}).ok()) << "empty pieces are pieces";
}

TEST_F(ControlClientTest, AReplyThatNeverEndsIsATimeout) {
  EXPECT_EQ(AnswerOf({"M{\"a\":"}).kind, Kind::kTimeout);
  EXPECT_EQ(AnswerOf({}).kind, Kind::kTimeout);
}

TEST_F(ControlClientTest, AConnectionThatCloses) {
  EXPECT_EQ(AnswerOf({}, true).kind, Kind::kClosed);
  EXPECT_EQ(AnswerOf({"M{"}, true).kind, Kind::kClosed);
}

TEST_F(ControlClientTest, PassesADescriptor) {
  StartServer([](const std::string&, int descriptor) {
    EXPECT_EQ(write(descriptor, "hello", 5), 5);
    close(descriptor);
    return FakeAnswer{{R"(L{"ok":true})"}};
  });
  int pipe_fds[2];
  ASSERT_EQ(pipe(pipe_fds), 0);
  ControlClient client;
  ASSERT_EQ(client.Connect(path_), "");
  EXPECT_TRUE(client.Request({{"op", "capture"}}, pipe_fds[1]).ok());
  close(pipe_fds[1]);
  char buffer[8] = {};
  EXPECT_EQ(read(pipe_fds[0], buffer, sizeof(buffer)), 5);
  EXPECT_EQ(read(pipe_fds[0], buffer, sizeof(buffer)), 0) << "nobody holds it any more";
  close(pipe_fds[0]);
}

TEST_F(ControlClientTest, WaitingCanBeCancelled) {
  StartServer([](const std::string&, int) { return FakeAnswer{}; });
  int pipe_fds[2];
  ASSERT_EQ(pipe(pipe_fds), 0);
  ASSERT_EQ(write(pipe_fds[1], "x", 1), 1);
  ControlClient client;
  ASSERT_EQ(client.Connect(path_), "");
  EXPECT_EQ(client.Receive(Milliseconds(-1), pipe_fds[0]).kind, Kind::kCancelled);
  close(pipe_fds[0]);
  close(pipe_fds[1]);
}

TEST_F(ControlClientTest, ShutdownIsSeenAsTheEndOfTheConnection) {
  StartServer([](const std::string&, int) { return FakeAnswer{{R"(L{"ok":true})"}, false, true}; });
  ControlClient client;
  ASSERT_EQ(client.Connect(path_), "");
  EXPECT_TRUE(client.Request({{"op", "shutdown"}}).ok());
  EXPECT_TRUE(client.WaitClosed(Milliseconds(5000)));
}

TEST_F(ControlClientTest, WaitClosedIsBounded) {
  StartServer([](const std::string&, int) { return FakeAnswer{{R"(L{"ok":true})"}}; });
  ControlClient client;
  ASSERT_EQ(client.Connect(path_), "");
  EXPECT_FALSE(client.WaitClosed(Milliseconds(100)));
}

TEST_F(ControlClientTest, NobodyThereIsASentence) {
  ControlClient client;
  EXPECT_NE(client.Connect(path_), "");
  EXPECT_NE(client.Connect(""), "");
  EXPECT_NE(client.Connect(std::string(200, 'x')), "");
  EXPECT_FALSE(client.connected());
  EXPECT_EQ(client.Request({{"op", "status"}}).kind, Kind::kClosed);
  EXPECT_FALSE(SomebodyListens(path_));
}

TEST_F(ControlClientTest, ARequestOverTheLimitIsNotSent) {
  StartServer([](const std::string&, int) { return FakeAnswer{{"L{}"}}; });
  ControlClient client;
  ASSERT_EQ(client.Connect(path_), "");
  EXPECT_EQ(client.Request({{"rule", std::string(70'000, 'x')}}).kind, Kind::kRefused);
}

TEST(ReplyFieldsTest, WrongTypesGiveTheFallback) {
  const Json json = Json::parse(R"({"n":null,"s":"text","i":-3,"f":1.5,"a":[1],"o":{"x":1}})");
  EXPECT_EQ(TextField(json, "s"), "text");
  EXPECT_EQ(TextField(json, "i"), "-3");
  EXPECT_EQ(TextField(json, "n", "?"), "?");
  EXPECT_EQ(TextField(json, "absent", "?"), "?");
  EXPECT_EQ(TextField(Json::array(), "s", "?"), "?");
  EXPECT_EQ(IntegerField(json, "i"), -3);
  EXPECT_EQ(IntegerField(json, "s", 9), 9);
  EXPECT_EQ(IntegerField(json, "f", 9), 9);
  EXPECT_EQ(ArrayField(json, "a").size(), 1U);
  EXPECT_TRUE(ArrayField(json, "o").empty());
  EXPECT_EQ(ObjectField(json, "o").size(), 1U);
  EXPECT_TRUE(ObjectField(json, "a").empty());
}

TEST(ReplyFieldsTest, TerminalControlSequencesAreShownAndNotObeyed) {
  EXPECT_EQ(Printable(std::string("a\033[2J\nb\x7f")), "a\\x1b[2J\\x0ab\\x7f");
  EXPECT_EQ(Dump(Json("\xff")), "\"\xef\xbf\xbd\"");
}

}  // namespace
}  // namespace verbena::tools
