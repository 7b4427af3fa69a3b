#include "cli/failure.h"

#include <algorithm>
#include <iostream>
#include <new>

#include "annulus/errors.h"

namespace annulus::cli {
namespace {

Failure failure(int code, std::string message, bool by_another_rank = false) {
  std::ranges::replace(message, '\n', ' ');
  return {code, std::move(message), by_another_rank};
}

}  // namespace

Failure failure_of(const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (const InvalidArgument& e) {
    return failure(kBadUsage, e.what());
  } catch (const Unsupported& e) {
    return failure(kBadUsage, e.what());
  } catch (const TransportError& e) {
    return failure(kEnvironment, e.what(), true);
  } catch (const std::bad_alloc&) {
    return failure(kEnvironment,
                   "out of memory: the system refused an allocation; give smaller sizes or use a larger machine");
  } catch (const std::exception& e) {  // OutOfMemory, DeviceError and what the standard library throws
    return failure(kEnvironment, e.what());
  }
}

void print_error(const std::string& message) {
  std::cout.flush();
  std::cerr << "annulus: " + message + "\n" << std::flush;
}

}  // namespace annulus::cli
