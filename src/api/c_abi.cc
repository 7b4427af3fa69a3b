// The C ABI over annulus::Attention: what is particular to C is read in c_abi_structs.cc, C++ does the rest.
#include "annulus/annulus.h"

#include <array>
#include <cstdio>
#include <new>

#include "annulus/attention.h"
#include "api/c_abi_structs.h"
#include "api/c_status.h"

struct annulus_attention {
  annulus::Attention attention;
};

namespace annulus {
namespace {

// Fixed, so that even running out of memory can be told.
std::array<char, 1024>& thread_message() {
  thread_local std::array<char, 1024> message{};
  return message;
}

int record(int status, const char* message) noexcept {
  std::snprintf(thread_message().data(), thread_message().size(), "%s", message);
  return status;
}

const Attention& target(const annulus_attention* handle) {
  return deref(handle, "attention", "make one with annulus_create").attention;
}

}  // namespace

int record_exception() noexcept {
  try {
    throw;
  } catch (const InvalidArgument& error) {
    return record(ANNULUS_INVALID_ARGUMENT, error.what());
  } catch (const Unsupported& error) {
    return record(ANNULUS_UNSUPPORTED, error.what());
  } catch (const OutOfMemory& error) {
    return record(ANNULUS_OUT_OF_MEMORY, error.what());
  } catch (const DeviceError& error) {
    return record(ANNULUS_DEVICE_ERROR, error.what());
  } catch (const TransportError& error) {
    return record(ANNULUS_TRANSPORT_ERROR, error.what());
  } catch (const std::bad_alloc&) {
    return record(ANNULUS_OUT_OF_MEMORY, "the system has no more memory: use fewer threads or free some");
  } catch (const std::exception& error) {
    return record(ANNULUS_INTERNAL, error.what());
  } catch (...) {
    return record(ANNULUS_INTERNAL, "an exception of unknown type: please report it");
  }
}

}  // namespace annulus

using namespace annulus;  // NOLINT(google-build-using-namespace): what follows is C

extern "C" {

const char* annulus_version(void) { return ANNULUS_VERSION; }

const char* annulus_last_error(void) { return thread_message().data(); }

int annulus_create(const annulus_problem* problem, const annulus_options* options, annulus_attention** attention) {
  return as_status([&] {
    annulus_attention*& result = deref(attention, "attention", "pass the address of the handle");
    result = nullptr;
    const Problem given = to_problem(checked_struct(problem, "problem"));
    result = new annulus_attention{Attention(given, to_options(options))};
  });
}

void annulus_destroy(annulus_attention* attention) { delete attention; }

int annulus_forward(const annulus_attention* attention, const annulus_forward_args* args) {
  return as_status([&] { target(attention).forward(to_args(checked_struct(args, "forward_args"))); });
}

int annulus_backward(const annulus_attention* attention, const annulus_backward_args* args) {
  return as_status([&] { target(attention).backward(to_args(checked_struct(args, "backward_args"))); });
}

int annulus_workspace_bytes(const annulus_attention* attention, int pass, size_t* bytes) {
  return as_status([&] {
    size_t& result = deref(bytes, "bytes", "pass the address of a size_t");
    result = target(attention).workspace_bytes(to_pass(pass));
  });
}

int annulus_explain(const annulus_attention* attention, char* buffer, size_t capacity, size_t* length) {
  return as_status([&] { copy_text(target(attention).explain(), buffer, capacity, length); });
}

int annulus_memory(const annulus_attention* attention, int pass, annulus_memory_component* components, size_t capacity,
                   size_t* count) {
  return as_status([&] { copy_components(target(attention).memory(to_pass(pass)), components, capacity, count); });
}

}  // extern "C"
