// What C hands over, read into the structs of C++: null pointers, struct sizes, enumerators that came as integers. All
// other checking is left to C++.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "annulus/annulus.h"
#include "annulus/attention.h"

namespace annulus {

inline constexpr std::size_t kLargestStruct = 4096;

template <class T>
T& deref(T* pointer, const char* name, const char* remedy) {
  if (pointer == nullptr) throw InvalidArgument(std::string(name) + " must not be null; got null: " + remedy);
  return *pointer;
}

// A struct of a later version may be longer; that is fine as long as it asks for nothing we do not know.
template <class Struct>
const Struct& checked_struct(const Struct* pointer, const char* name) {
  const std::string type = std::string("annulus_") + name;
  const Struct& value = deref(pointer, name, ("pass a pointer to an " + type).c_str());
  if (value.struct_size < sizeof(Struct) || value.struct_size > kLargestStruct)
    throw InvalidArgument("struct_size of " + type + " must be at least " + std::to_string(sizeof(Struct)) + "; got " +
                          std::to_string(value.struct_size) + ": set it to sizeof(" + type + ")");
  const auto* bytes = reinterpret_cast<const unsigned char*>(pointer);
  if (!std::all_of(bytes + sizeof(Struct), bytes + value.struct_size, [](unsigned char byte) { return byte == 0; }))
    throw Unsupported("fields of " + type + " behind byte " + std::to_string(sizeof(Struct)) +
                      " must be 0 in version " ANNULUS_VERSION "; got a value there: use a newer library");
  return value;
}

template <class T>
std::span<const T> checked_list(const T* pointer, std::int64_t count, const char* name) {
  if (count < 0 || (count > 0 && pointer == nullptr))
    throw InvalidArgument(std::string(name) + " must be a pointer and the number of its elements; got " +
                          (pointer == nullptr ? "null" : "a pointer") + " and " + std::to_string(count) +
                          ": pass both, or null and 0");
  return {pointer, static_cast<std::size_t>(count)};
}

// Buffers come with their size, or not at all: half of it is a slip that must not pass as "none".
template <class T>
std::span<T> checked_buffer(T* pointer, std::size_t count, const char* name) {
  if ((pointer == nullptr) != (count == 0))
    throw InvalidArgument(std::string(name) + " must be a pointer and its size; got " +
                          (pointer == nullptr ? "null" : "a pointer") + " and " + std::to_string(count) +
                          ": pass both, or null and 0");
  return {pointer, count};
}

template <class Enum>
Enum checked_enum(const char* name, int value, int first, int last) {
  if (value < first || value > last)
    throw InvalidArgument(std::string(name) + " must be from " + std::to_string(first) + " to " + std::to_string(last) +
                          "; got " + std::to_string(value) + ": use one of enum annulus_" + name);
  return static_cast<Enum>(value - first);
}

Pass to_pass(int value);
Problem to_problem(const annulus_problem& from);
Options to_options(const annulus_options* from);
ForwardArgs to_args(const annulus_forward_args& from);
BackwardArgs to_args(const annulus_backward_args& from);

// Like snprintf, for texts of any length; and the same for lists of memory components.
void copy_text(const std::string& text, char* buffer, std::size_t capacity, std::size_t* length);
void copy_components(const std::vector<MemoryComponent>& all, annulus_memory_component* components,
                     std::size_t capacity, std::size_t* count);

}  // namespace annulus
