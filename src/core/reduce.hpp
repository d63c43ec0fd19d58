// Reductions of blocks of numbers in rank order: the same bits wherever they are computed.
#pragma once

#include <cstddef>
#include <cstdint>

namespace unisono {

// Numbers under which dtypes and reductions travel; unisono.comm.reductions has the same order.
enum Dtype : int {
  kFloat32, kFloat64, kFloat16, kBfloat16, kInt64, kInt32, kInt16, kInt8, kUint8, kBool,
  kComplex64, kComplex128, kUint16, kUint32, kUint64, kComplex32, kDtypes
};
enum Op : int { kSum, kProduct, kMin, kMax, kAnd, kOr, kXor, kSum64, kMean, kOps };

// Writes the reduction of `parts[0..count)`, first to last, to `out`. `out` may be any one of the
// parts or apart from them all. 16-bit floats are carried in float32 and rounded once.
using Reduce = void (*)(void* out, const void* const* parts, int count, size_t elements);

// Null where the reduction is not defined for the dtype.
Reduce reduction(int dtype, int op);
size_t element_bytes(int dtype);

}  // namespace unisono
