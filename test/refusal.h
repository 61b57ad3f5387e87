// What the library says when it refuses a call.
#pragma once

#if __has_include(<catch2/catch_all.hpp>)
#include <catch2/catch_all.hpp>
#else
#include <catch2/catch.hpp>
#endif

#include "single_query/attention.h"

#include <functional>
#include <string>

namespace single_query::test {

// The message of an invalid argument; empty if `call` is not refused. Any other exception is not caught.
inline std::string refusal(const std::function<void()>& call) {
  try {
    call();
  } catch (const Error& error) {
    if (error.kind() != Error::Kind::invalid_argument) {
      throw;
    }
    return error.what();
  }
  return "";
}

} // namespace single_query::test
