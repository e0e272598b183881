// One exception type for each kind of error; all are thrown before any work starts unless said
// otherwise.
#pragma once

#include <stdexcept>
#include <string>

namespace flash_kda {

// Base of everything this library throws.
class Error : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// Wrong kind of object (Python: TypeError).
class TypeError : public Error {
 public:
  using Error::Error;
};

// Wrong shape, dtype, stride, device or range. The text names the argument, what was expected, what
// came (Python: ValueError).
class ValueError : public Error {
 public:
  using Error::Error;
};

// A legal call that this device or build does not serve. The text names both (Python:
// NotImplementedError).
class NotImplementedError : public Error {
 public:
  using Error::Error;
};

// What CUDA reported (Python: RuntimeError). A launch error can surface after work was queued.
class DeviceError : public Error {
 public:
  using Error::Error;
};

}  // namespace flash_kda
