// Stochastic gradient descent as torch.optim.SGD does it.
#pragma once

#include "update/step.hpp"

namespace ds_slide {
namespace {

enum class Momentum { none, heavy_ball, nesterov };

template <Momentum momentum_kind>
struct Sgd {
  static constexpr std::size_t states = momentum_kind == Momentum::none ? 0 : 1;  // momentum_buffer
  static constexpr bool short_formats = false;
  static constexpr bool two_passes = false;  // weight decay makes the new momentum depend on the old weight
  enum Number { grad_scale, weight_decay, lr, momentum, one_minus_dampening };
  static constexpr std::size_t numbers = one_minus_dampening + 1;

  /// The new weight.
  template <class V>
  static inline __attribute__((always_inline)) typename V::Float step(StepNumbers<V, Sgd> const& number,
                                                                      typename V::Float w,
                                                                      typename V::Float g,
                                                                      StepStates<V, Sgd>& state,
                                                                      typename V::Float* /*move*/ = nullptr) {
    g = V::add(g, V::mul(w, number[weight_decay]));
    if constexpr (momentum_kind != Momentum::none) {
      state[0] = V::add(V::mul(state[0], number[momentum]), V::mul(g, number[one_minus_dampening]));
      g = momentum_kind == Momentum::nesterov ? V::add(g, V::mul(state[0], number[momentum])) : state[0];
    }
    return V::sub(w, V::mul(g, number[lr]));
  }

  template <class V>
  struct Inverse {
    typename V::Float momentum, decay;
    explicit Inverse(StepNumbers<V, Sgd> const& number)
        : momentum(V::div(V::set(1.0F), number[Sgd::momentum])),
          decay(V::div(V::set(1.0F), V::sub(V::set(1.0F), V::mul(number[weight_decay], number[lr])))) {}
  };

  /// As in Adamw.
  template <class V, class Decode>
  static inline __attribute__((always_inline)) void back(StepNumbers<V, Sgd> const& number,
                                                         Inverse<V> const& inverse, typename V::Float w,
                                                         typename V::Float g, StepStates<V, Sgd> const& state,
                                                         Decode const& decode,
                                                         typename V::Float const* /*move*/ = nullptr) {
    if constexpr (momentum_kind == Momentum::heavy_ball) {
      w = decode(0, V::add(w, V::mul(state[0], number[lr])));
    } else {
      auto const moved = momentum_kind == Momentum::none ? g : V::add(g, V::mul(state[0], number[momentum]));
      w = decode(0, V::mul(V::add(w, V::mul(moved, number[lr])), inverse.decay));
    }
    if constexpr (momentum_kind != Momentum::none) {
      g = V::add(g, V::mul(w, number[weight_decay]));
      decode(1, V::mul(V::sub(state[0], V::mul(g, number[one_minus_dampening])), inverse.momentum));
    }
  }
};

}  // namespace
}  // namespace ds_slide
