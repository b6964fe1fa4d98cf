// SPDX-License-Identifier: Apache-2.0
//
// Fields of JSON objects that come from elsewhere: of whatever type they really
// are, nothing throws.
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>

namespace verbena::nic {

// Keeps the order of fields.
using Json = nlohmann::ordered_json;

std::string TextField(const Json& object, const char* key, const std::string& fallback = "");
int64_t IntegerField(const Json& object, const char* key, int64_t fallback = 0);
// The array or object of that name, or an empty one.
const Json& ArrayField(const Json& object, const char* key);
const Json& ObjectField(const Json& object, const char* key);
// One line of text for any scalar; arrays and objects as JSON. Control characters, which a
// process name may contain, are shown as \xNN.
std::string Printable(const Json& value);
std::string Printable(const std::string& text);
// Never throws: bytes that are no UTF-8 are replaced.
std::string Dump(const Json& value, int indent = -1);

}  // namespace verbena::nic
