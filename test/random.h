// Random numbers that are the same on every platform.
#pragma once

#include <cstdint>
#include <initializer_list>

namespace single_query::test {

// SplitMix64 (Steele, Lea and Flood, 2014).
class Random {
public:
  explicit Random(std::uint64_t seed) : state_(seed) {}

  std::uint64_t bits() {
    state_ += 0x9e3779b97f4a7c15u;
    std::uint64_t mixed = (state_ ^ state_ >> 30) * 0xbf58476d1ce4e5b9u;
    mixed = (mixed ^ mixed >> 27) * 0x94d049bb133111ebu;
    return mixed ^ mixed >> 31;
  }

  double uniform(double low, double high) { return low + (high - low) * static_cast<double>(bits() >> 11) * 0x1p-53; }
  bool chance(double probability) { return uniform(0, 1) < probability; }

  // low .. high, both included
  std::int64_t integer(std::int64_t low, std::int64_t high) {
    return low + static_cast<std::int64_t>(bits() % static_cast<std::uint64_t>(high - low + 1));
  }

  template <class T>
  T one_of(std::initializer_list<T> choices) {
    return choices.begin()[bits() % choices.size()];
  }

private:
  std::uint64_t state_;
};

} // namespace single_query::test
