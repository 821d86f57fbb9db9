// Copy: a view of a value, times a factor, in the order of rows. Split: a value → its
// pieces, which lie one behind the other. XLA:CPU compiles a loop for each use of such
// a copy and for each piece.

#include "views.h"

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "parts.h"
#include "vectors.h"
#include "xla/ffi/api/ffi.h"

namespace xla_pp {
namespace {

namespace ffi = xla::ffi;

// Rows and columns that are turned together: they stay in the nearest cache.
constexpr int64_t kTile = 16;

// A view of four dimensions; the last two are those of matrices.
struct View {
  int64_t sizes[4];
  int64_t strides[4];
  float factor;
};

// Copies rows of one matrix of a view.
XPP_INLINE void CopyMatrix(const View& view, const float* from, Range rows,
                           float* result) {
  const int64_t columns = view.sizes[3], down = view.strides[2],
                along = view.strides[3];
  const int64_t last = rows.begin + rows.size;
  const float factor = view.factor;
  if (along == 1) {
    for (int64_t row = rows.begin; row < last; ++row) {
      const float* in = from + row * down;
      float* out = result + row * columns;
      for (int64_t i = 0; i < columns; ++i) out[i] = in[i] * factor;
    }
    return;
  }
  for (int64_t first = rows.begin; first < last; first += kTile) {
    const int64_t end = std::min(last, first + kTile);
    for (int64_t begin = 0; begin < columns; begin += kTile) {
      const int64_t stop = std::min(columns, begin + kTile);
      for (int64_t row = first; row < end; ++row) {
        for (int64_t i = begin; i < stop; ++i) {
          result[row * columns + i] = from[row * down + i * along] * factor;
        }
      }
    }
  }
}

// Copies rows, counted over all matrices.
XPP_VECTORS void CopyRows(const View& view, const float* from, Range rows,
                          float* result) {
  const int64_t height = view.sizes[2];
  const int64_t last = rows.begin + rows.size;
  for (int64_t begin = rows.begin; begin < last;) {
    const int64_t matrix = begin / height, first = begin % height;
    const int64_t size = std::min(last - begin, height - first);
    const int64_t place = matrix / view.sizes[1] * view.strides[0] +
                          matrix % view.sizes[1] * view.strides[1];
    CopyMatrix(view, from + place, {first, size},
               result + matrix * height * view.sizes[3]);
    begin += size;
  }
}

using Values = ffi::Buffer<ffi::F32>;
using Result = ffi::ResultBuffer<ffi::F32>;

ffi::Future Copy(ffi::ThreadPool pool, Values values, Result result, int64_t offset,
                 int64_t factor, int64_t size_0, int64_t size_1, int64_t size_2,
                 int64_t size_3, int64_t stride_0, int64_t stride_1, int64_t stride_2,
                 int64_t stride_3) {
  const auto bits = static_cast<uint32_t>(factor);
  View view{
      {size_0, size_1, size_2, size_3}, {stride_0, stride_1, stride_2, stride_3}, 0};
  std::memcpy(&view.factor, &bits, sizeof(bits));
  const float* from = values.typed_data() + offset;
  float* out = result->typed_data();
  const int64_t rows = size_0 * size_1 * size_2;
  return RunParts(pool, rows, rows * size_3,
                  [=](Range range) { CopyRows(view, from, range, out); });
}

XLA_FFI_DEFINE_HANDLER(kCopy, Copy,
                       ffi::Ffi::Bind()
                           .Ctx<ffi::ThreadPool>()
                           .Arg<Values>()
                           .Ret<Values>()
                           .Attr<int64_t>("offset")
                           .Attr<int64_t>("factor")
                           .Attr<int64_t>("size_0")
                           .Attr<int64_t>("size_1")
                           .Attr<int64_t>("size_2")
                           .Attr<int64_t>("size_3")
                           .Attr<int64_t>("stride_0")
                           .Attr<int64_t>("stride_1")
                           .Attr<int64_t>("stride_2")
                           .Attr<int64_t>("stride_3"));

// The attributes are the sizes of the pieces, which the results have, too.
ffi::Error Split(Values values, ffi::RemainingRets pieces, ffi::Dictionary) {
  const float* from = values.typed_data();
  for (size_t i = 0; i < pieces.size(); ++i) {
    const auto piece = *pieces.get<Values>(i).value();
    std::copy_n(from, piece.element_count(), piece.typed_data());
    from += piece.element_count();
  }
  return ffi::Error::Success();
}

XLA_FFI_DEFINE_HANDLER(kSplit, Split,
                       ffi::Ffi::Bind().Arg<Values>().RemainingRets().Attrs());

}  // namespace

XLA_FFI_Handler* CopyHandler() { return kCopy; }

XLA_FFI_Handler* SplitHandler() { return kSplit; }

}  // namespace xla_pp
