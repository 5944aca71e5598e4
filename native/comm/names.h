// SPDX-License-Identifier: Apache-2.0
// Names in errors: escaped, and of long ones the beginning, and where they differ.
#pragma once

#include <string>
#include <string_view>

namespace singa_lite {

constexpr std::size_t kShownBytes = 120;  // of a name that may be longer
constexpr std::size_t kBeforeBytes = 30;  // of them, before the first difference

// The `count` bytes of `text` from `begin` on, without the parts of characters (UTF-8) at the two ends.
inline std::string_view characters(std::string_view text, std::size_t begin, std::size_t count) {
  const auto is_inside = [&](std::size_t at) { return at < text.size() && (text[at] & 0xc0) == 0x80; };
  std::size_t end = begin + count < text.size() ? begin + count : text.size();
  while (is_inside(begin)) ++begin;
  while (end > begin && is_inside(end)) --end;
  return text.substr(begin, end - begin);
}

// As Python's repr, but for what is not ASCII: nothing ends a line or a C string, or is obeyed by a terminal.
inline std::string escaped(std::string_view name) {
  constexpr char kDigits[] = "0123456789abcdef";
  std::string text;
  for (const char c : name) {
    const auto byte = static_cast<unsigned char>(c);
    if (c == '\\') text += "\\\\";
    else if (c == '\n') text += "\\n";
    else if (c == '\r') text += "\\r";
    else if (c == '\t') text += "\\t";
    else if (byte < 0x20 || byte == 0x7f) text += {'\\', 'x', kDigits[byte >> 4], kDigits[byte & 15]};
    else text += c;
  }
  return text;
}

// A name of any length, of which errors show the beginning.
inline std::string shortened(std::string_view name) {
  if (name.size() <= kShownBytes) return escaped(name);
  return escaped(characters(name, 0, kShownBytes)) + "...";
}

// The same, with the part where it first differs from `other`.
inline std::string shortened(std::string_view name, std::string_view other) {
  std::size_t at = 0;
  while (at < name.size() && at < other.size() && name[at] == other[at]) ++at;
  if (name.size() <= kShownBytes || at + kBeforeBytes < kShownBytes) return shortened(name);
  const std::string_view beginning = characters(name, 0, kShownBytes / 2);
  const std::string_view part = characters(name, at - kBeforeBytes, kShownBytes);
  const bool is_end = part.data() + part.size() == name.data() + name.size();
  return escaped(beginning) + "..." + escaped(part) + (is_end ? "" : "...");
}

}  // namespace singa_lite
