// The steps of unisono.bayes.LSTM; src/unisono/bayes/layers/recurrence.py has the formulas.
#pragma once

#include <cstddef>

namespace unisono {

struct LstmSizes {
  size_t batch, steps, width, units;
};

// Where the numbers of a pass lie. Gates are f, i, c, o. x and h have samples first: [batch, steps, ...];
// what forward leaves for backward has them last: [..., steps, batch].
template <class T> struct LstmForward {
  const T *mean_w, *var_w;  // [4, units, width + units], columns of x before those of h
  const T *mean_b, *var_b;  // [4, units]; null for none
  const T *mean_x, *var_x;  // variances are null for certain values
  const T* before;          // [4, units, batch]: mean and variance of h, and of the cell; null for zero
  T *mean_h, *var_h;
  T* after;      // as `before`
  T* inputs;     // [width + units, ...], means of x and of h before; this and all below may be null
  T* gates;      // [4, units, ...], derivatives of the cell by f, i, c, and of h by o
  T* through_c;  // [units, ...], of h by the cell
  T* forget;     // [units, ...], mean of gate f
};
template <class T> struct LstmBackward {
  const T *mean_w, *gates, *through_c, *forget;
  const T *mean_h, *var_h;    // deltas
  T *mean_gates, *var_gates;  // deltas of gates before their functions, [4, units, steps, batch]
  T *mean_x, *var_x;          // null if nobody wants them
};

void run_pass(const LstmSizes& n, const LstmForward<float>& at);
void run_pass(const LstmSizes& n, const LstmForward<double>& at);
void run_pass(const LstmSizes& n, const LstmBackward<float>& at);
void run_pass(const LstmSizes& n, const LstmBackward<double>& at);

}  // namespace unisono
