// Lion (Chen et al. 2023, arXiv 2302.06675).
#pragma once

#include "update/step.hpp"

namespace ds_slide {
namespace {

struct Lion {
  static constexpr std::size_t states = 1;  // exp_avg
  static constexpr bool is_signed[states] = {true};
  static constexpr bool short_formats = false;
  static constexpr bool two_passes = true;
  enum Number { grad_scale, decay, lr, beta1, one_minus_beta1, beta2, one_minus_beta2 };
  static constexpr std::size_t numbers = one_minus_beta2 + 1;

  /// The new weight: it moves by lr against the sign of the interpolated gradient, not at all where that is
  /// zero, and is NaN where that is.
  template <class V>
  static inline __attribute__((always_inline)) typename V::Float step(StepNumbers<V, Lion> const& number,
                                                                      typename V::Float w,
                                                                      typename V::Float g,
                                                                      StepStates<V, Lion>& state,
                                                                      typename V::Float* /*move*/ = nullptr) {
    auto const moved = move<V>(number, g, state[0]);
    state[0] = V::add(V::mul(state[0], number[beta2]), V::mul(g, number[one_minus_beta2]));
    return V::sub(V::mul(w, number[decay]), moved);
  }

  template <class V>
  struct Inverse {
    typename V::Float decay, beta2;
    explicit Inverse(StepNumbers<V, Lion> const& number)
        : decay(V::div(V::set(1.0F), number[Lion::decay])),
          beta2(V::div(V::set(1.0F), number[Lion::beta2])) {}
  };

  /// As in Adamw.
  template <class V, class Decode>
  static inline __attribute__((always_inline)) void back(
      StepNumbers<V, Lion> const& number, Inverse<V> const& inverse, typename V::Float w, typename V::Float g,
      StepStates<V, Lion> const& state, Decode const& decode, typename V::Float const* /*move*/ = nullptr) {
    auto const old = decode(1, V::mul(V::sub(state[0], V::mul(g, number[one_minus_beta2])), inverse.beta2));
    decode(0, V::mul(V::add(w, move<V>(number, g, old)), inverse.decay));
  }

 private:
  template <class V>
  static inline __attribute__((always_inline)) typename V::Float move(StepNumbers<V, Lion> const& number,
                                                                      typename V::Float g,
                                                                      typename V::Float exp_avg) {
    auto const direction =
        V::bits(V::add(V::mul(exp_avg, number[beta1]), V::mul(g, number[one_minus_beta1])));
    auto const magnitude = V::and_int(direction, V::set_int(0x7FFFFFFFu));
    auto const sign = V::and_int(direction, V::set_int(0x80000000u));
    auto const infinity = V::set_int(0x7F800000u);
    auto const step = V::keep_if(V::is_positive(magnitude), V::or_int(sign, V::bits(number[lr])));
    auto const nan = V::keep_if(V::is_positive(V::sub_int(magnitude, infinity)), V::set_int(0x7FC00000u));
    return V::floats(V::or_int(step, nan));
  }
};

}  // namespace
}  // namespace ds_slide
