// What can go wrong, as one small hierarchy. Every message names the rule, the value received and the remedy.
#pragma once

#include <stdexcept>

namespace annulus {

class Error : public std::runtime_error {
  using std::runtime_error::runtime_error;
};

class InvalidArgument : public Error {  // the caller can mend it: a size, a shape, a file, an option
  using Error::Error;
};

class Unsupported : public Error {  // right in principle, but this device or build cannot do it
  using Error::Error;
};

class OutOfMemory : public Error {
  using Error::Error;
};

class DeviceError : public Error {  // the machine failed us: a missing instruction set, a full disk, a lost GPU
  using Error::Error;
};

class TransportError : public Error {
  using Error::Error;
};

}  // namespace annulus
