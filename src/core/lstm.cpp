#include "lstm.hpp"

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <vector>

#include "vectorised.hpp"

namespace unisono {
namespace {

// So many samples go side by side: loops over them are vectors, whatever the batch is. Missing ones of the
// last lot are zeros, which nobody reads. Unrolled, the loops would be taken for plain numbers.
constexpr size_t kLanes = 16;
template <class T> using Lanes = T[kLanes];
#define EACH_LANE _Pragma("GCC unroll 1") for (size_t l = 0; l < kLanes; l++)

// e^x - 1 to the last digits, also near zero; finite for all x but NaN. By e^x = 2^n e^r with a series for
// the small r; the addition of `whole` rounds to integers and leaves them in the lowest bits.
template <class T> INLINED T expm1(T x) {
  using Bits = std::conditional_t<sizeof(T) == 4, uint32_t, uint64_t>;
  constexpr bool is_double = sizeof(T) == 8;
  constexpr T whole = is_double ? T(6755399441055744.0) : T(12582912.0);
  constexpr T largest = is_double ? T(708) : T(87);
  constexpr T ln2_high = is_double ? T(0.693147180369123816490) : T(0.693359375);
  constexpr T ln2_low = is_double ? T(1.90821492927058770002e-10) : T(-2.12194440e-4);
  constexpr int terms = is_double ? 14 : 8, mantissa = is_double ? 52 : 23, bias = is_double ? 1023 : 127;
  x = x < -largest ? -largest : x;
  x = x > largest ? largest : x;
  const T shifted = x * T(1.44269504088896340736) + whole, n = shifted - whole;
  const T r = (x - n * ln2_high) - n * ln2_low;
  T series = 1;
  for (int k = terms; k > 1; k--) series = 1 + series * r * (T(1) / k);
  Bits bits, base;
  std::memcpy(&bits, &shifted, sizeof(T));
  std::memcpy(&base, &whole, sizeof(T));
  bits = (bits - base + bias) << mantissa;
  T power;
  std::memcpy(&power, &bits, sizeof(T));
  return power * (series * r) + (power - 1);
}
template <class T> INLINED T sigmoid(T x) { return 1 / (2 + expm1(-x)); }
template <class T> INLINED T tanh(T x) {
  const T grown = expm1(2 * x);
  return grown / (grown + 2);
}

// Means and variances of units, lanes last.
template <class T> struct Units {
  std::vector<T> numbers;
  size_t size;
  explicit Units(size_t n) : numbers(2 * n * kLanes), size(n) {}
  Lanes<T>* mean() { return reinterpret_cast<Lanes<T>*>(numbers.data()); }
  Lanes<T>* var() { return mean() + size; }
};

// Gates of one unit before their functions.
template <class T> struct Gates {
  Lanes<T> mean[4], var[4], cov;  // `cov`: of i and c
  Lanes<T> pairs[3];              // covariances of f, i, c with o that come from x
};

template <bool of_x, class T>
INLINED void add_column(Gates<T>& z, const T (&w)[4], const T (&vw)[4], const Lanes<T>& mean, const Lanes<T>& var) {
  Lanes<T> second;
  EACH_LANE second[l] = mean[l] * mean[l] + var[l];
  for (int g = 0; g < 4; g++) {
    EACH_LANE z.mean[g][l] += w[g] * mean[l];
    EACH_LANE z.var[g][l] += w[g] * w[g] * var[l] + vw[g] * second[l];
  }
  EACH_LANE z.cov[l] += w[1] * w[2] * var[l];
  if constexpr (of_x)
    for (int g = 0; g < 3; g++) EACH_LANE z.pairs[g][l] += w[g] * w[3] * var[l];
}

// Of one unit, as `LstmTrail` has them.
template <class T> struct Derivatives {
  Lanes<T> gates[4], through_c, forget;
};

// One unit's step: from its gates and its cell before to h, the cell after, and their derivatives.
template <class T>
INLINED void activate(const Gates<T>& z, Lanes<T>& mean_h, Lanes<T>& var_h, Lanes<T>& mean_c, Lanes<T>& var_c,
                      Derivatives<T>& by) {
  EACH_LANE {
    const T f = sigmoid(z.mean[0][l]), i = sigmoid(z.mean[1][l]), g = tanh(z.mean[2][l]), o = sigmoid(z.mean[3][l]);
    const T slope_f = f - f * f, slope_i = i - i * i, slope_g = 1 - g * g, slope_o = o - o * o;
    const T vf = z.var[0][l] * slope_f * slope_f, vi = z.var[1][l] * slope_i * slope_i;
    const T vg = z.var[2][l] * slope_g * slope_g, vo = z.var[3][l] * slope_o * slope_o;
    const T before = mean_c[l], cov = slope_i * slope_g * z.cov[l];
    const T c = f * before + i * g + cov;
    const T vc = var_c[l] * (f * f + vf) + vf * before * before + vg * (i * i + vi) + vi * g * g +
                 cov * (cov + 2 * i * g);
    const T ca = tanh(c), slope_c = 1 - ca * ca, h = o * ca;
    const T by_f = slope_f * before, by_i = slope_i * g, by_g = slope_g * i;
    const T with_o = (z.pairs[0][l] * by_f + z.pairs[1][l] * by_i + z.pairs[2][l] * by_g) * slope_c * slope_o;
    mean_h[l] = h + with_o;
    var_h[l] = vc * slope_c * slope_c * (o * o + vo) + vo * ca * ca + with_o * (with_o + 2 * h);
    mean_c[l] = c;
    var_c[l] = vc;
    by.gates[0][l] = by_f;
    by.gates[1][l] = by_i;
    by.gates[2][l] = by_g;
    by.gates[3][l] = slope_o * ca;
    by.through_c[l] = slope_c * o;
    by.forget[l] = f;
  }
}

// Copies `count` numbers from `at` on, each `stride` behind the one before; missing lanes, and all from
// nowhere, become zero.
template <class T> INLINED void load(Lanes<T>& to, const T* from, size_t at, size_t stride, size_t count) {
  EACH_LANE to[l] = from && l < count ? from[at + l * stride] : T(0);
}
template <class T> INLINED void store(T* to, size_t at, size_t stride, size_t count, const Lanes<T>& from) {
  for (size_t l = 0; l < count; l++) to[at + l * stride] = from[l];
}

// A lot of samples at one time step: where its numbers are.
struct Lot {
  const LstmSizes& n;
  size_t first, count, t;
  // In [features, steps, batch].
  size_t in_trail(size_t feature) const { return (feature * n.steps + t) * n.batch + first; }
  // In [batch, steps, features], where samples are `stride` apart.
  size_t in_rows(size_t feature, size_t features) const { return (first * n.steps + t) * features + feature; }
  size_t stride(size_t features) const { return n.steps * features; }
};

// The weights of the four gates of one unit for one column.
template <class T> INLINED void take(T (&to)[4], const T* weights, const LstmSizes& n, size_t unit, size_t column) {
  for (size_t g = 0; g < 4; g++) to[g] = weights[(g * n.units + unit) * (n.width + n.units) + column];
}

template <class T> INLINED void forward(const LstmSizes& n, const LstmForward<T>& at) {
  const size_t width = n.width, units = n.units, columns = width + units;
  Units<T> inputs(columns), hidden(units), cells(units);  // `inputs`: x, and h before
  Lanes<T>* const state[4] = {inputs.mean() + width, inputs.var() + width, cells.mean(), cells.var()};
  for (size_t first = 0; first < n.batch; first += kLanes) {
    Lot lot{n, first, std::min(kLanes, n.batch - first), 0};
    for (size_t u = 0; u < units; u++)
      for (size_t part = 0; part < 4; part++)
        load(state[part][u], at.before, (part * units + u) * n.batch + first, 1, lot.count);
    for (; lot.t < n.steps; lot.t++) {
      for (size_t j = 0; j < width; j++) {
        load(inputs.mean()[j], at.mean_x, lot.in_rows(j, width), lot.stride(width), lot.count);
        load(inputs.var()[j], at.var_x, lot.in_rows(j, width), lot.stride(width), lot.count);
      }
      if (at.inputs)
        for (size_t j = 0; j < columns; j++) store(at.inputs, lot.in_trail(j), 1, lot.count, inputs.mean()[j]);
      for (size_t u = 0; u < units; u++) {
        Gates<T> z{};
        if (at.mean_b)
          for (size_t g = 0; g < 4; g++) {
            EACH_LANE z.mean[g][l] = at.mean_b[g * units + u];
            EACH_LANE z.var[g][l] = at.var_b[g * units + u];
          }
        for (size_t j = 0; j < columns; j++) {
          T w[4], vw[4];
          take(w, at.mean_w, n, u, j);
          take(vw, at.var_w, n, u, j);
          if (j < width) add_column<true>(z, w, vw, inputs.mean()[j], inputs.var()[j]);
          else add_column<false>(z, w, vw, inputs.mean()[j], inputs.var()[j]);
        }
        Derivatives<T> by;
        activate(z, hidden.mean()[u], hidden.var()[u], cells.mean()[u], cells.var()[u], by);
        store(at.mean_h, lot.in_rows(u, units), lot.stride(units), lot.count, hidden.mean()[u]);
        store(at.var_h, lot.in_rows(u, units), lot.stride(units), lot.count, hidden.var()[u]);
        if (!at.inputs) continue;
        for (size_t g = 0; g < 4; g++) store(at.gates, lot.in_trail(g * units + u), 1, lot.count, by.gates[g]);
        store(at.through_c, lot.in_trail(u), 1, lot.count, by.through_c);
        store(at.forget, lot.in_trail(u), 1, lot.count, by.forget);
      }
      std::memcpy(state[0], hidden.mean(), units * sizeof(Lanes<T>));
      std::memcpy(state[1], hidden.var(), units * sizeof(Lanes<T>));
    }
    for (size_t u = 0; u < units; u++)
      for (size_t part = 0; part < 4; part++)
        store(at.after, (part * units + u) * n.batch + first, 1, lot.count, state[part][u]);
  }
}

// Deltas of one unit's h and of its cell as the step after sees it, and the derivatives between.
template <class T> struct Back {
  Lanes<T> mean_h, var_h, mean_c, var_c;
  Derivatives<T> by;
};

template <class T> INLINED void backward(const LstmSizes& n, const LstmBackward<T>& at) {
  const size_t width = n.width, units = n.units, columns = width + units;
  std::vector<Back<T>> back(units);
  for (size_t first = 0; first < n.batch; first += kLanes) {
    Lot lot{n, first, std::min(kLanes, n.batch - first), 0};
    Units<T> hidden(units), cells(units);  // from the step after: none at the last
    for (size_t left = n.steps; left > 0; left--) {
      lot.t = left - 1;
      for (size_t u = 0; u < units; u++) {
        Back<T>& b = back[u];
        Lanes<T> mean[4], var[4];
        load(b.mean_h, at.mean_h, lot.in_rows(u, units), lot.stride(units), lot.count);
        load(b.var_h, at.var_h, lot.in_rows(u, units), lot.stride(units), lot.count);
        for (size_t g = 0; g < 4; g++) load(b.by.gates[g], at.gates, lot.in_trail(g * units + u), 1, lot.count);
        load(b.by.through_c, at.through_c, lot.in_trail(u), 1, lot.count);
        load(b.by.forget, at.forget, lot.in_trail(u), 1, lot.count);
        EACH_LANE {
          const T dm = b.mean_h[l] += hidden.mean()[u][l], dv = b.var_h[l] += hidden.var()[u][l];
          const T cm = b.mean_c[l] = cells.mean()[u][l], cv = b.var_c[l] = cells.var()[u][l];
          const T k = b.by.through_c[l], f = b.by.forget[l], um = cm + k * dm, uv = cv + k * k * dv;
          for (int g = 0; g < 4; g++) {
            const T slope = b.by.gates[g][l];
            mean[g][l] = slope * (g < 3 ? um : dm);
            var[g][l] = slope * slope * (g < 3 ? uv : dv);
          }
          cells.mean()[u][l] = f * um;
          cells.var()[u][l] = f * f * uv;
        }
        for (size_t g = 0; g < 4; g++) {
          store(at.mean_gates, lot.in_trail(g * units + u), 1, lot.count, mean[g]);
          store(at.var_gates, lot.in_trail(g * units + u), 1, lot.count, var[g]);
        }
      }
      for (size_t j = at.mean_x ? 0 : width; j < (lot.t ? columns : width); j++) {
        Lanes<T> mean{}, var{};
        for (size_t u = 0; u < units; u++) {
          const Back<T>& b = back[u];
          T w[4];
          take(w, at.mean_w, n, u, j);
          EACH_LANE {  // derivatives of the cell and of h by this column
            const T to_c = b.by.gates[0][l] * w[0] + b.by.gates[1][l] * w[1] + b.by.gates[2][l] * w[2];
            const T to_h = b.by.through_c[l] * to_c + b.by.gates[3][l] * w[3];
            mean[l] += to_h * b.mean_h[l] + to_c * b.mean_c[l];
            var[l] += to_h * to_h * b.var_h[l] + to_c * to_c * b.var_c[l];
          }
        }
        if (j < width) {
          store(at.mean_x, lot.in_rows(j, width), lot.stride(width), lot.count, mean);
          store(at.var_x, lot.in_rows(j, width), lot.stride(width), lot.count, var);
        } else {
          std::memcpy(hidden.mean()[j - width], mean, sizeof(mean));
          std::memcpy(hidden.var()[j - width], var, sizeof(var));
        }
      }
    }
  }
}

}  // namespace

VECTORISED void run_pass(const LstmSizes& n, const LstmForward<float>& at) { forward(n, at); }
VECTORISED void run_pass(const LstmSizes& n, const LstmForward<double>& at) { forward(n, at); }
VECTORISED void run_pass(const LstmSizes& n, const LstmBackward<float>& at) { backward(n, at); }
VECTORISED void run_pass(const LstmSizes& n, const LstmBackward<double>& at) { backward(n, at); }

}  // namespace unisono
