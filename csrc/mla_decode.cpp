#include "mla_decode.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <sstream>
#include <stdexcept>

#include "mlx/allocator.h"
#include "mlx/backend/cpu/encoder.h"
#include "mlx/utils.h"

namespace mla {
namespace {

constexpr int kNaNByte = 0xff;  // repeated, a NaN in each of the dtypes

// The Python front door explains; here is only what keeps the kernel inside its buffers.
void expect(bool good, const char* what) {
  if (!good) throw std::invalid_argument(std::string("[mla_decode] expected ") + what);
}

void check(const mx::array& q_nope, const std::optional<mx::array>& q_pe, const mx::array& latent,
           const std::optional<mx::array>& k_pe, const std::optional<mx::array>& tables, const Call& call) {
  const auto dtype = q_nope.dtype();
  expect(dtype == mx::float32 || dtype == mx::float16 || dtype == mx::bfloat16, "float32, float16 or bfloat16");
  expect(q_nope.ndim() == 4 && q_nope.size() > 0, "q_nope [batch, heads, q_len, rank]");
  const int batch = q_nope.shape(0), rank = q_nope.shape(3), rope = q_pe ? q_pe->shape(-1) : 0;
  expect((rank == 512 && (rope == 64 || rope == 0)) || (rank == 256 && (rope == 64 || rope == 32)),
         "a geometry of 512+64, 512+0, 256+64 or 256+32");
  mx::Shape rope_shape = q_nope.shape();
  rope_shape.back() = rope;
  expect(!q_pe || (q_pe->dtype() == dtype && q_pe->shape() == rope_shape), "q_pe like q_nope");
  expect(latent.dtype() == dtype, "latent of q_nope's dtype");
  int64_t slots;
  if (tables) {
    expect(latent.ndim() == 3 && latent.shape(2) == rank + rope && latent.size() > 0 && !k_pe,
           "latent [blocks, block_size, rank + rope]");
    expect(tables->ndim() == 2 && tables->shape(0) == batch && tables->dtype() == mx::int32,
           "block_tables [batch, pages] int32");
    slots = int64_t(tables->shape(1)) * latent.shape(1);
  } else {
    expect(latent.ndim() == 4 && latent.shape() == mx::Shape{batch, 1, latent.shape(2), rank},
           "latent [batch, 1, slots, rank]");
    expect(bool(k_pe) == bool(q_pe), "k_pe where q_pe is");
    expect(!k_pe || (k_pe->dtype() == dtype && k_pe->shape() == mx::Shape{batch, 1, latent.shape(2), rope}),
           "k_pe like latent");
    slots = latent.shape(2);
  }
  expect(call.lengths.size() == size_t(batch) && call.starts.size() == size_t(batch), "lengths and starts [batch]");
  for (int b = 0; b < batch; ++b)
    expect(0 <= call.starts[b] && call.starts[b] <= call.lengths[b] &&
               call.lengths[b] <= std::min(slots, int64_t(1) << 30),
           "0 <= starts <= lengths <= slots");
  expect(1 <= call.request.partitions && call.request.partitions <= kMostPartitions, "partitions in 1..256");
  expect(call.request.tile >= 0 && std::isfinite(call.scale), "a tile >= 0 and a finite scale");
}

Dtype kernel_dtype(mx::Dtype dtype) {
  return dtype == mx::float32 ? Dtype::f32 : dtype == mx::float16 ? Dtype::f16 : Dtype::bf16;
}

char* gather(const mx::array& a, int dim, const char* from, char* to) {
  const size_t bytes = a.itemsize();
  for (int i = 0; i < a.shape(dim); ++i, from += a.strides()[dim] * int64_t(bytes)) {
    if (dim + 1 < int(a.ndim())) {
      to = gather(a, dim + 1, from, to);
    } else {
      std::memcpy(to, from, bytes);
      to += bytes;
    }
  }
  return to;
}

// Where an input's rows are. Their numbers lie side by side: anything else is copied first, which no caller we know
// needs.
struct Rows {
  const char* data;
  int64_t strides[3];
};

Rows rows_of(const mx::array& in, mx::cpu::CommandEncoder& encoder) {
  if (in.shape(-1) == 1 || in.strides(-1) == 1) {
    Rows rows{in.data<char>(), {}};
    std::copy_n(in.strides().begin(), in.ndim() - 1, rows.strides);
    return rows;
  }
  mx::array copy(in.shape(), in.dtype(), nullptr, {});
  copy.set_data(mx::allocator::malloc(copy.nbytes()));
  encoder.add_temporary(copy);
  encoder.dispatch(
      [from = mx::array::unsafe_weak_copy(in), to = copy.data<char>()] { gather(from, 0, from.data<char>(), to); });
  return rows_of(copy, encoder);
}

Query query_of(const mx::array& q_nope, const mx::array* q_pe, mx::cpu::CommandEncoder& encoder) {
  const Rows nope = rows_of(q_nope, encoder), rope = q_pe ? rows_of(*q_pe, encoder) : Rows{};
  Query q{nope.data, rope.data, {}, {}};
  std::copy_n(nope.strides, 3, q.nope_strides);
  std::copy_n(rope.strides, 3, q.rope_strides);
  return q;
}

Cache cache_of(const mx::array& latent, const mx::array* k_pe, const mx::array* table, int rank,
               mx::cpu::CommandEncoder& encoder) {
  const Rows nope = rows_of(latent, encoder), rope = k_pe ? rows_of(*k_pe, encoder) : nope;
  const int token = table ? 1 : 2;
  Cache c{};
  c.latent = nope.data;
  c.rope = table ? nope.data + rank * latent.itemsize() : rope.data;
  c.latent_outer = nope.strides[0];
  c.latent_token = nope.strides[token];
  c.rope_outer = rope.strides[0];
  c.rope_token = rope.strides[token];
  if (table) {
    c.table = table->data<int32_t>();
    c.table_row = table->strides(0);
    c.table_column = table->strides(1);
    c.blocks = latent.shape(0);
    c.block_size = latent.shape(1);
  }
  return c;
}

}  // namespace

Answer mla_decode(const mx::array& q_nope, const std::optional<mx::array>& q_pe, const mx::array& latent,
                  const std::optional<mx::array>& k_pe, const std::optional<mx::array>& block_tables,
                  std::vector<int> lengths, std::vector<int> starts, float scale, int partitions, int tile, int ticket,
                  bool want_lse) {
  auto call = std::make_shared<const Call>(
      Call{scale, want_lse, {partitions, tile, ticket}, std::move(lengths), std::move(starts)});
  check(q_nope, q_pe, latent, k_pe, block_tables, *call);
  std::vector<mx::array> inputs;
  inputs.reserve(4);
  inputs.assign({q_nope, latent});
  for (const auto* more : {&q_pe, &k_pe, &block_tables})
    if (*more) inputs.push_back(**more);
  const auto& q = q_nope.shape();
  auto primitive =
      std::make_shared<MlaDecode>(mx::to_stream({}), std::move(call), q_pe.has_value(), block_tables.has_value());
  if (!want_lse) return {mx::array(q, q_nope.dtype(), std::move(primitive), std::move(inputs)), std::nullopt};
  auto outputs =
      mx::array::make_arrays({q, mx::Shape{q[0], q[1], q[2]}}, {q_nope.dtype(), mx::float32}, primitive, inputs);
  return {outputs[0], outputs[1]};
}

// The inputs' buffers exist now and are filled when the stream gets here: addresses and strides are for now, contents
// for the lambdas. The scheduler keeps the buffers alive; counted references would block donation.
void MlaDecode::eval_cpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) {
  auto& encoder = mx::cpu::get_command_encoder(stream());
  for (const auto& in : inputs) encoder.set_input_array(in);
  for (auto& out : outputs) {
    out.set_data(mx::allocator::malloc(out.nbytes()));
    encoder.set_output_array(out);
  }
  const mx::array &q_nope = inputs[0], &latent = inputs[1];
  const mx::array* q_pe = has_rope_ ? &inputs[2] : nullptr;
  const mx::array* k_pe = has_rope_ && !paged_ ? &inputs[3] : nullptr;
  const mx::array* table = paged_ ? &inputs.back() : nullptr;
  Problem a{};
  a.batch = q_nope.shape(0);
  a.heads = q_nope.shape(1);
  a.q_len = q_nope.shape(2);
  a.rank = q_nope.shape(3);
  a.rope = q_pe ? q_pe->shape(3) : 0;
  a.dtype = kernel_dtype(q_nope.dtype());
  a.scale = call_->scale;
  a.query = query_of(q_nope, q_pe, encoder);
  a.cache = cache_of(latent, k_pe, table, a.rank, encoder);
  a.lengths = call_->lengths.data();
  a.starts = call_->starts.data();
  a.out = outputs[0].data<char>();
  if (call_->want_lse) a.lse = outputs[1].data<float>();
  encoder.dispatch([a, call = call_, out_bytes = outputs[0].nbytes()] {
    try {
      decode(a, call->request);
    } catch (...) {
      // MLX counts the outputs as available from here on: whoever reads them all the same must see that they are not.
      std::memset(a.out, kNaNByte, out_bytes);
      if (a.lse) std::memset(a.lse, kNaNByte, sizeof(float) * a.batch * a.rows());
      throw;
    }
  });
}

void MlaDecode::eval_gpu(const std::vector<mx::array>&, std::vector<mx::array>&) {
  throw std::runtime_error("[mla_decode] expected a CPU stream; this primitive has no GPU kernel");
}

std::vector<mx::Shape> MlaDecode::output_shapes(const std::vector<mx::array>& inputs) {
  const auto& q = inputs[0].shape();
  if (!call_->want_lse) return {q};
  return {q, mx::Shape{q[0], q[1], q[2]}};
}

}  // namespace mla
