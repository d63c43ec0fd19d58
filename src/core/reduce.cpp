#include "reduce.hpp"

#include <algorithm>
#include <complex>
#include <cstring>
#include <type_traits>

#include "vectorised.hpp"

namespace unisono {
namespace {

struct Half { uint16_t bits; };
struct Brain { uint16_t bits; };
struct HalfComplex { Half re, im; };
struct Bool { uint8_t value; };

inline float as_float(uint32_t bits) { float x; std::memcpy(&x, &bits, 4); return x; }
inline uint32_t as_bits(float x) { uint32_t bits; std::memcpy(&bits, &x, 4); return bits; }

// A subnormal half is a small integer times 2^-24, which the subtraction below makes exact.
inline float widen(Half h) {
  const uint32_t sign = (h.bits & 0x8000u) << 16, rest = h.bits & 0x7FFFu;
  const float normal = as_float((rest << 13) + (112u << 23));
  const float special = as_float((rest << 13) + (224u << 23));
  const float subnormal = as_float((rest << 13) + (113u << 23)) - as_float(113u << 23);
  const float size = rest >= 0x7C00u ? special : rest < 0x0400u ? subnormal : normal;
  return as_float(as_bits(size) | sign);
}
inline float widen(Brain b) { return as_float(static_cast<uint32_t>(b.bits) << 16); }

// To nearest, ties to even. Adding 0.5 shifts a result too small for a normal half into place.
inline Half narrow_half(float x) {
  const uint32_t bits = as_bits(x), sign = (bits >> 16) & 0x8000u, size = bits & 0x7FFFFFFFu;
  const uint32_t odd = (size >> 13) & 1;
  const uint32_t normal = (size - (112u << 23) + 0xFFFu + odd) >> 13;
  const uint32_t subnormal = as_bits(as_float(size) + 0.5f) - as_bits(0.5f);
  const uint32_t special = size > 0x7F800000u ? 0x7E00u : 0x7C00u;
  const uint32_t rest = size >= 0x477FF000u ? special : size < 0x38800000u ? subnormal : normal;
  return {static_cast<uint16_t>(sign | rest)};
}
inline Brain narrow_brain(float x) {
  const uint32_t bits = as_bits(x);
  const uint32_t rounded = (bits + 0x7FFFu + ((bits >> 16) & 1)) >> 16;
  const bool is_nan = (bits & 0x7FFFFFFFu) > 0x7F800000u;
  return {static_cast<uint16_t>(is_nan ? 0x7FC0u : rounded)};
}
// float64 to 16 bits: by way of float32, as torch does.
inline void narrow(Half& out, double x) { out = narrow_half(static_cast<float>(x)); }
inline void narrow(Brain& out, double x) { out = narrow_brain(static_cast<float>(x)); }
inline void narrow(Half& out, float x) { out = narrow_half(x); }
inline void narrow(Brain& out, float x) { out = narrow_brain(x); }
inline void narrow(HalfComplex& out, std::complex<float> x) {
  out = {narrow_half(x.real()), narrow_half(x.imag())};
}
template <class T> inline void narrow(T& out, T x) { out = x; }
inline void narrow(float& out, double x) { out = static_cast<float>(x); }
inline std::complex<float> widen(HalfComplex c) { return {widen(c.re), widen(c.im)}; }
template <class T> inline T widen(T x) { return x; }

// The type in which an element is carried, by reduction.
template <class T, int op> struct Carrier { using type = T; };
template <int op> struct Carrier<Half, op> { using type = std::conditional_t<op == kSum64, double, float>; };
template <int op> struct Carrier<Brain, op> { using type = std::conditional_t<op == kSum64, double, float>; };
template <int op> struct Carrier<HalfComplex, op> { using type = std::complex<float>; };
template <> struct Carrier<float, kSum64> { using type = double; };

template <int op, class A> inline A combine(A a, A b) {
  if constexpr (std::is_integral_v<A>) {
    using U = std::make_unsigned_t<std::conditional_t<(sizeof(A) < 4), int32_t, A>>;  // wraps as torch does
    if constexpr (op == kSum) return static_cast<A>(static_cast<U>(a) + static_cast<U>(b));
    if constexpr (op == kProduct) return static_cast<A>(static_cast<U>(a) * static_cast<U>(b));
    if constexpr (op == kAnd) return a & b;
    if constexpr (op == kOr) return a | b;
    if constexpr (op == kXor) return a ^ b;
    if constexpr (op == kMin) return b < a ? b : a;
    if constexpr (op == kMax) return a < b ? b : a;
  } else {
    if constexpr (op == kProduct) return a * b;
    // A NaN on any rank is a NaN in the result.
    if constexpr (op == kMin) return (a < b || a != a) ? a : b;
    if constexpr (op == kMax) return (b < a || a != a) ? a : b;
    if constexpr (op == kSum || op == kSum64 || op == kMean) return a + b;
  }
}
template <int op> inline Bool combine(Bool a, Bool b) {
  const bool x = a.value, y = b.value;
  if constexpr (op == kSum || op == kMax || op == kOr) return {static_cast<uint8_t>(x | y)};
  if constexpr (op == kXor) return {static_cast<uint8_t>(x ^ y)};
  return {static_cast<uint8_t>(x & y)};
}

template <int op, class A> inline A finish(A total, int count) {
  if constexpr (op != kMean) return total;
  else if constexpr (std::is_floating_point_v<A>) return total / static_cast<A>(count);
  else return total / static_cast<typename A::value_type>(count);
}

// A block of carriers stays in the first cache while every rank's part is added to it.
constexpr size_t kBlock = 2048;

template <class T, int op>
INLINED void reduce_blocks(void* out, const void* const* parts, int count, size_t n) {
  using A = typename Carrier<T, op>::type;
  T* target = static_cast<T*>(out);
  alignas(64) A carried[kBlock];
  for (size_t at = 0; at < n; at += kBlock) {
    const size_t m = std::min(kBlock, n - at);
    const T* first = static_cast<const T*>(parts[0]) + at;
    if constexpr (std::is_same_v<A, T>) {
      if (count == 2) {  // most common by far: no carrier needed
        const T* second = static_cast<const T*>(parts[1]) + at;
        for (size_t i = 0; i < m; i++) target[at + i] = finish<op>(combine<op>(first[i], second[i]), 2);
        continue;
      }
    }
    for (size_t i = 0; i < m; i++) carried[i] = static_cast<A>(widen(first[i]));
    for (int p = 1; p < count; p++) {
      const T* part = static_cast<const T*>(parts[p]) + at;
      for (size_t i = 0; i < m; i++) carried[i] = combine<op>(carried[i], static_cast<A>(widen(part[i])));
    }
    for (size_t i = 0; i < m; i++) narrow(target[at + i], finish<op>(carried[i], count));
  }
}

#define REDUCTION(name, T, op) \
  VECTORISED void name##_##op(void* out, const void* const* parts, int count, size_t n) { \
    reduce_blocks<T, op>(out, parts, count, n); \
  }
#define FLOATS(name, T) \
  REDUCTION(name, T, kSum) REDUCTION(name, T, kProduct) REDUCTION(name, T, kMin) REDUCTION(name, T, kMax) \
  REDUCTION(name, T, kSum64) REDUCTION(name, T, kMean)
#define INTEGERS(name, T) \
  REDUCTION(name, T, kSum) REDUCTION(name, T, kProduct) REDUCTION(name, T, kMin) REDUCTION(name, T, kMax) \
  REDUCTION(name, T, kAnd) REDUCTION(name, T, kOr) REDUCTION(name, T, kXor)
#define COMPLEXES(name, T) REDUCTION(name, T, kSum) REDUCTION(name, T, kProduct) REDUCTION(name, T, kMean)

FLOATS(f32, float) FLOATS(f64, double) FLOATS(f16, Half) FLOATS(bf16, Brain)
INTEGERS(i64, int64_t) INTEGERS(i32, int32_t) INTEGERS(i16, int16_t) INTEGERS(i8, int8_t)
INTEGERS(u64, uint64_t) INTEGERS(u32, uint32_t) INTEGERS(u16, uint16_t) INTEGERS(u8, uint8_t)
INTEGERS(b, Bool)
COMPLEXES(c64, std::complex<float>) COMPLEXES(c128, std::complex<double>) COMPLEXES(c32, HalfComplex)

#define OF_FLOATS(n) {n##_kSum, n##_kProduct, n##_kMin, n##_kMax, nullptr, nullptr, nullptr, n##_kSum64, n##_kMean}
#define OF_INTEGERS(n) {n##_kSum, n##_kProduct, n##_kMin, n##_kMax, n##_kAnd, n##_kOr, n##_kXor, nullptr, nullptr}
#define OF_COMPLEXES(n) {n##_kSum, n##_kProduct, nullptr, nullptr, nullptr, nullptr, nullptr, nullptr, n##_kMean}

const Reduce kReductions[kDtypes][kOps] = {
    OF_FLOATS(f32), OF_FLOATS(f64), OF_FLOATS(f16), OF_FLOATS(bf16),
    OF_INTEGERS(i64), OF_INTEGERS(i32), OF_INTEGERS(i16), OF_INTEGERS(i8), OF_INTEGERS(u8), OF_INTEGERS(b),
    OF_COMPLEXES(c64), OF_COMPLEXES(c128),
    OF_INTEGERS(u16), OF_INTEGERS(u32), OF_INTEGERS(u64), OF_COMPLEXES(c32),
};
const size_t kBytes[kDtypes] = {4, 8, 2, 2, 8, 4, 2, 1, 1, 1, 8, 16, 2, 4, 8, 4};

}  // namespace

Reduce reduction(int dtype, int op) {
  return dtype < 0 || dtype >= kDtypes || op < 0 || op >= kOps ? nullptr : kReductions[dtype][op];
}
size_t element_bytes(int dtype) { return dtype < 0 || dtype >= kDtypes ? 0 : kBytes[dtype]; }

}  // namespace unisono
