// SPDX-License-Identifier: Apache-2.0
//
// The results as JUnit XML, for CI systems: a test case for each scenario.
#include <fmt/format.h>

#include "tools/verbena_cli/scenario/scenario.h"

namespace verbena::tools {
namespace {

std::string Escaped(const std::string& text) {
  std::string out;
  for (const char c : text) {
    switch (c) {
      case '&':
        out += "&amp;";
        break;
      case '<':
        out += "&lt;";
        break;
      case '>':
        out += "&gt;";
        break;
      case '"':
        out += "&quot;";
        break;
      case '\n':
        out += "&#10;";
        break;
      default: {
        // XML has no other control characters; what is no ASCII may be no UTF-8.
        const auto byte = static_cast<unsigned char>(c);
        out += byte < 0x20 || byte >= 0x7f ? '?' : c;
      }
    }
  }
  return out;
}

}  // namespace

std::string JUnitXml(const std::vector<ScenarioResult>& results) {
  size_t failures = 0, errors = 0;
  double seconds = 0;
  for (const ScenarioResult& result : results) {
    failures += result.started && !result.good();
    errors += !result.started;
    seconds += result.seconds;
  }
  std::string xml = fmt::format(
      "<?xml version=\"1.0\" encoding=\"UTF-8\"?>\n<testsuites>\n<testsuite name=\"verbena "
      "scenarios\" tests=\"{}\" failures=\"{}\" errors=\"{}\" time=\"{:.3f}\">\n",
      results.size(), failures, errors, seconds);
  for (const ScenarioResult& result : results) {
    xml += fmt::format("<testcase classname=\"scenarios\" name=\"{}\" time=\"{:.3f}\">\n",
                       Escaped(result.name), result.seconds);
    std::string text;
    for (const ScenarioFinding& finding : result.findings) {
      text += fmt::format("{} {}\n", finding.good ? "ok  " : "BAD ", finding.text);
    }
    if (!result.started) {
      xml += fmt::format("<error message=\"{}\"/>\n", Escaped(result.trouble));
    } else if (!result.good()) {
      std::string first;
      for (const ScenarioFinding& finding : result.findings) {
        if (!finding.good && first.empty()) first = finding.text;
      }
      xml += fmt::format("<failure message=\"{}\">{}</failure>\n", Escaped(first),
                         Escaped(text + result.detail));
    }
    xml += fmt::format("<system-out>{}</system-out>\n</testcase>\n", Escaped(text));
  }
  return xml + "</testsuite>\n</testsuites>\n";
}

}  // namespace verbena::tools
