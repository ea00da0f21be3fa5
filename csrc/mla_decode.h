// The op and its MLX primitive.
#pragma once

#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "cpu_decode.h"
#include "mlx/array.h"
#include "mlx/primitives.h"

namespace mla {

namespace mx = mlx::core;

// Everything about a call but the arrays.
struct Call {
  float scale;
  bool want_lse;
  Request request;
  std::vector<int> lengths, starts;  // [batch]
};

// out [batch, heads, q_len, rank] in q_nope's dtype and, where it was asked for, lse [batch, heads, q_len] in float32.
using Answer = std::pair<mx::array, std::optional<mx::array>>;

// Lazy.
//   q_nope [batch, heads, q_len, rank], q_pe [batch, heads, q_len, rope] (none for geometries without rope)
//   paged: latent [blocks, block_size, rank + rope], k_pe none, block_tables [batch, pages a sequence] int32
//   dense: latent [batch, 1, slots, rank], k_pe [batch, 1, slots, rope] (none without rope), block_tables none
// The inputs may have any strides; the cache is not copied unless its last dimension is strided.
Answer mla_decode(const mx::array& q_nope, const std::optional<mx::array>& q_pe, const mx::array& latent,
                  const std::optional<mx::array>& k_pe, const std::optional<mx::array>& block_tables,
                  std::vector<int> lengths, std::vector<int> starts, float scale, int partitions, int tile, int ticket,
                  bool want_lse);

class MlaDecode : public mx::Primitive {
 public:
  // Inputs: q_nope, latent, then those of q_pe, k_pe and block_tables that there are.
  MlaDecode(mx::Stream stream, std::shared_ptr<const Call> call, bool has_rope, bool paged)
      : mx::Primitive(stream), call_(std::move(call)), has_rope_(has_rope), paged_(paged) {}

  void eval_cpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) override;
  void eval_gpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) override;
  const char* name() const override { return "MlaDecode"; }
  std::vector<mx::Shape> output_shapes(const std::vector<mx::array>& inputs) override;

 private:
  std::shared_ptr<const Call> call_;
  bool has_rope_, paged_;
};

}  // namespace mla
