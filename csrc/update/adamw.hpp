// AdamW, and Adam with L2.
#pragma once

#include "update/step.hpp"

namespace ds_slide {
namespace {

/// `decoupled`: weight decay shrinks the weight; otherwise it is added to the gradient.
template <bool decoupled>
struct Adamw {
  static constexpr std::size_t states = 2;  // exp_avg, exp_avg_sq
  static constexpr bool is_signed[states] = {true, false};
  static constexpr bool short_formats = true;
  static constexpr bool two_passes = decoupled;  // else the new states depend on the old weight
  enum Number {
    grad_scale,
    decay,
    weight_decay,
    beta1,
    one_minus_beta1,
    beta2,
    one_minus_beta2,
    inv_bc2_sqrt,
    step_size,
    eps,
  };
  static constexpr std::size_t numbers = eps + 1;

  /// The new weight, and what it has moved by, which takes a root and a quotient.
  template <class V>
  static inline __attribute__((always_inline)) typename V::Float step(
      StepNumbers<V, Adamw> const& number, typename V::Float w, typename V::Float g,
      StepStates<V, Adamw>& state, typename V::Float* move_of_step = nullptr) {
    if constexpr (decoupled) {
      w = V::mul(w, number[decay]);
    } else {
      g = V::add(g, V::mul(w, number[weight_decay]));
    }
    auto const m = V::add(V::mul(state[0], number[beta1]), V::mul(g, number[one_minus_beta1]));
    auto const v = V::add(V::mul(state[1], number[beta2]), V::mul(V::mul(g, g), number[one_minus_beta2]));
    state[0] = m;
    state[1] = v;
    auto const moved = move<V>(number, state);
    if (move_of_step != nullptr) *move_of_step = moved;
    return V::sub(w, moved);
  }

  /// What a step with these new states takes from the weight.
  template <class V>
  static inline __attribute__((always_inline)) typename V::Float move(StepNumbers<V, Adamw> const& number,
                                                                      StepStates<V, Adamw> const& state) {
    auto const denominator = V::add(V::mul(V::sqrt(state[1]), number[inv_bc2_sqrt]), number[eps]);
    return V::mul(V::div(state[0], denominator), number[step_size]);
  }

  template <class V>
  struct Inverse {
    typename V::Float decay, beta1, beta2;
    explicit Inverse(StepNumbers<V, Adamw> const& number)
        : decay(V::div(V::set(1.0F), number[Adamw::decay])),
          beta1(V::div(V::set(1.0F), number[Adamw::beta1])),
          beta2(V::div(V::set(1.0F), number[Adamw::beta2])) {}
  };

  /// The old numbers from the new ones, near enough for `decode`, which makes them exact: of the weight (0)
  /// and of each state (1, 2).
  template <class V, class Decode>
  static inline __attribute__((always_inline)) void back(StepNumbers<V, Adamw> const& number,
                                                         Inverse<V> const& inverse, typename V::Float w,
                                                         typename V::Float g,
                                                         StepStates<V, Adamw> const& state,
                                                         Decode const& decode,
                                                         typename V::Float const* move_of_step = nullptr) {
    w = V::add(w, move_of_step != nullptr ? *move_of_step : move<V>(number, state));
    if constexpr (decoupled) {
      decode(0, V::mul(w, inverse.decay));
    } else {
      g = V::add(g, V::mul(decode(0, w), number[weight_decay]));
    }
    decode(1, V::mul(V::sub(state[0], V::mul(g, number[one_minus_beta1])), inverse.beta1));
    decode(2, V::mul(V::sub(state[1], V::mul(V::mul(g, g), number[one_minus_beta2])), inverse.beta2));
  }
};

}  // namespace
}  // namespace ds_slide
