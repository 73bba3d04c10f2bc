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

  /// The new weight.
  template <class V>
  static inline __attribute__((always_inline)) typename V::Float step(StepNumbers<V, Adamw> const& number,
                                                                      typename V::Float w,
                                                                      typename V::Float g,
                                                                      StepStates<V, Adamw>& state) {
    if constexpr (decoupled) {
      w = V::mul(w, number[decay]);
    } else {
      g = V::add(g, V::mul(w, number[weight_decay]));
    }
    auto const m = V::add(V::mul(state[0], number[beta1]), V::mul(g, number[one_minus_beta1]));
    auto const v = V::add(V::mul(state[1], number[beta2]), V::mul(V::mul(g, g), number[one_minus_beta2]));
    state[0] = m;
    state[1] = v;
    auto const denominator = V::add(V::mul(V::sqrt(v), number[inv_bc2_sqrt]), number[eps]);
    return V::sub(w, V::mul(V::div(m, denominator), number[step_size]));
  }
};

}  // namespace
}  // namespace ds_slide
