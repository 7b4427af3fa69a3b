// Names of enumerators, both ways, from one table each.
#pragma once

#include <array>
#include <string>
#include <string_view>
#include <utility>

#include "annulus/errors.h"

namespace annulus {

template <class Enum, std::size_t n>
using NameTable = std::array<std::pair<Enum, std::string_view>, n>;

template <class Enum, std::size_t n>
std::string_view find_name(const NameTable<Enum, n>& table, Enum value) {
  for (const auto& [entry, text] : table)
    if (entry == value) return text;
  throw InvalidArgument("an enumerator without a name: " + std::to_string(static_cast<int>(value)) +
                        "; use one that the header lists");
}

template <class Enum, std::size_t n>
Enum find_value(const NameTable<Enum, n>& table, std::string_view what, std::string_view text) {
  std::string known;
  for (const auto& [entry, entry_text] : table) {
    if (entry_text == text) return entry;
    known += (known.empty() ? "" : ", ") + std::string(entry_text);
  }
  throw InvalidArgument(std::string(what) + " must be one of " + known + "; got '" + std::string(text) +
                        "': choose one of them");
}

}  // namespace annulus
