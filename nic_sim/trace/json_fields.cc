// SPDX-License-Identifier: Apache-2.0
#include "nic_sim/trace/json_fields.h"

#include <fmt/format.h>

namespace verbena::nic {

std::string TextField(const Json& object, const char* key, const std::string& fallback) {
  if (!object.is_object()) return fallback;
  const auto field = object.find(key);
  return field == object.end() || field->is_null() ? fallback : Printable(*field);
}

int64_t IntegerField(const Json& object, const char* key, int64_t fallback) {
  if (!object.is_object()) return fallback;
  const auto field = object.find(key);
  if (field == object.end() || !field->is_number_integer()) return fallback;
  return field->get<int64_t>();
}

const Json& ArrayField(const Json& object, const char* key) {
  static const Json kEmpty = Json::array();
  if (!object.is_object()) return kEmpty;
  const auto field = object.find(key);
  return field != object.end() && field->is_array() ? *field : kEmpty;
}

const Json& ObjectField(const Json& object, const char* key) {
  static const Json kEmpty = Json::object();
  if (!object.is_object()) return kEmpty;
  const auto field = object.find(key);
  return field != object.end() && field->is_object() ? *field : kEmpty;
}

std::string Printable(const std::string& text) {
  std::string shown;
  for (const char c : text) {
    const auto byte = static_cast<unsigned char>(c);
    if (byte < 0x20 || byte == 0x7f) {
      shown += fmt::format("\\x{:02x}", byte);
    } else {
      shown += c;
    }
  }
  return shown;
}

std::string Printable(const Json& value) {
  if (value.is_string()) return Printable(value.get_ref<const std::string&>());
  if (value.is_null()) return "-";
  if (value.is_boolean()) return value.get<bool>() ? "yes" : "no";
  return Dump(value);
}

std::string Dump(const Json& value, int indent) {
  return value.dump(indent, ' ', /*ensure_ascii=*/false, Json::error_handler_t::replace);
}

}  // namespace verbena::nic
