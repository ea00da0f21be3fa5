#include "mla_decode.h"

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
  expect(1 <= call.request.partitions && call.request.partitions <= kMostPartitions, "partitions in 1..64");
  expect(call.request.tile >= 0 && std::isfinite(call.scale), "a tile >= 0 and a finite scale");
}

Dtype kernel_dtype(mx::Dtype dtype) {
  return dtype == mx::float32 ? Dtype::f32 : dtype == mx::float16 ? Dtype::f16 : Dtype::bf16;
}

// An input as the kernel wants it: numbers of a row side by side. Anything else is copied, which no caller we know
// needs.
class Rows {
 public:
  explicit Rows(const mx::array& a) : data_(a.data<char>()), strides_(a.strides()) {
    if (a.shape(-1) == 1 || strides_.back() == 1) return;
    copy_.resize(a.nbytes());
    gather(a, 0, data_, copy_.data());
    data_ = copy_.data();
    int64_t stride = 1;
    for (int i = a.ndim() - 1; i >= 0; stride *= a.shape(i--)) strides_[i] = stride;
  }
  const char* data() const { return data_; }
  int64_t stride(int dim) const { return strides_[dim]; }

 private:
  static char* gather(const mx::array& a, int dim, const char* from, char* to) {
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
  const char* data_;
  mx::Strides strides_;
  std::vector<char> copy_;
};

// What the lambda on the stream holds on to. The scheduler keeps the buffers alive: counted references would block
// donation.
struct Inputs {
  mx::array q_nope, latent;
  std::optional<mx::array> q_pe, k_pe, tables;
};

Inputs weak_inputs(const std::vector<mx::array>& in, bool has_rope, bool paged) {
  size_t at = 2;
  auto take = [&](bool there) { return there ? std::optional(mx::array::unsafe_weak_copy(in[at++])) : std::nullopt; };
  auto q_pe = take(has_rope), k_pe = take(has_rope && !paged), tables = take(paged);
  return {mx::array::unsafe_weak_copy(in[0]), mx::array::unsafe_weak_copy(in[1]), q_pe, k_pe, tables};
}

void run(const Inputs& in, const Call& call, mx::array& out, mx::array& lse) {
  Problem a{};
  a.batch = in.q_nope.shape(0);
  a.heads = in.q_nope.shape(1);
  a.q_len = in.q_nope.shape(2);
  a.rank = in.q_nope.shape(3);
  a.rope = in.q_pe ? in.q_pe->shape(3) : 0;
  a.dtype = kernel_dtype(in.q_nope.dtype());
  a.scale = call.scale;
  a.lengths = call.lengths.data();
  a.starts = call.starts.data();
  a.out = out.data<char>();
  a.lse = lse.data<float>();

  const Rows nope(in.q_nope), latent(in.latent);
  std::optional<Rows> q_pe, k_pe;
  a.query = {nope.data(), nullptr, {nope.stride(0), nope.stride(1), nope.stride(2)}, {}};
  if (in.q_pe) {
    q_pe.emplace(*in.q_pe);
    a.query.rope = q_pe->data();
    for (int i = 0; i < 3; ++i) a.query.rope_strides[i] = q_pe->stride(i);
  }
  Cache& c = a.cache;
  c.latent = latent.data();
  c.latent_outer = latent.stride(0);
  c.latent_token = latent.stride(in.tables ? 1 : 2);
  c.rope = latent.data() + (in.tables ? a.rank * in.latent.itemsize() : 0);
  c.rope_outer = c.latent_outer;
  c.rope_token = c.latent_token;
  if (in.k_pe) {
    k_pe.emplace(*in.k_pe);
    c.rope = k_pe->data();
    c.rope_outer = k_pe->stride(0);
    c.rope_token = k_pe->stride(2);
  }
  if (in.tables) {
    c.table = in.tables->data<int32_t>();
    c.table_row = in.tables->strides()[0];
    c.table_column = in.tables->strides()[1];
    c.blocks = in.latent.shape(0);
    c.block_size = in.latent.shape(1);
  }
  decode(a, call.request);
}

}  // namespace

std::pair<mx::array, mx::array> mla_decode(const mx::array& q_nope, const std::optional<mx::array>& q_pe,
                                           const mx::array& latent, const std::optional<mx::array>& k_pe,
                                           const std::optional<mx::array>& block_tables, std::vector<int> lengths,
                                           std::vector<int> starts, float scale, int partitions, int tile, int ticket) {
  auto call =
      std::make_shared<const Call>(Call{scale, {partitions, tile, ticket}, std::move(lengths), std::move(starts)});
  check(q_nope, q_pe, latent, k_pe, block_tables, *call);
  std::vector<mx::array> inputs{q_nope, latent};
  for (const auto* more : {&q_pe, &k_pe, &block_tables})
    if (*more) inputs.push_back(**more);
  const auto& q = q_nope.shape();
  auto primitive =
      std::make_shared<MlaDecode>(mx::to_stream({}), std::move(call), q_pe.has_value(), block_tables.has_value());
  auto outputs =
      mx::array::make_arrays({q, mx::Shape{q[0], q[1], q[2]}}, {q_nope.dtype(), mx::float32}, primitive, inputs);
  return {outputs[0], outputs[1]};
}

void MlaDecode::eval_cpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) {
  auto& encoder = mx::cpu::get_command_encoder(stream());
  for (auto& out : outputs) {
    out.set_data(mx::allocator::malloc(out.nbytes()));
    encoder.set_output_array(out);
  }
  for (const auto& in : inputs) encoder.set_input_array(in);
  // The inputs' buffers are filled only when the stream gets here: strides may be read now, contents in the lambda
  // alone.
  encoder.dispatch([in = weak_inputs(inputs, has_rope_, paged_), call = call_,
                    out = mx::array::unsafe_weak_copy(outputs[0]),
                    lse = mx::array::unsafe_weak_copy(outputs[1])]() mutable {
    try {
      run(in, *call, out, lse);
    } catch (...) {
      // MLX counts the outputs as available from here on: whoever reads them all the same must see that they are not.
      std::memset(out.data<char>(), kNaNByte, out.nbytes());
      std::memset(lse.data<char>(), kNaNByte, lse.nbytes());
      throw;
    }
  });
}

void MlaDecode::eval_gpu(const std::vector<mx::array>&, std::vector<mx::array>&) {
  throw std::runtime_error("[mla_decode] expected a CPU stream; this primitive has no GPU kernel");
}

std::vector<mx::Shape> MlaDecode::output_shapes(const std::vector<mx::array>& inputs) {
  const auto& q = inputs[0].shape();
  return {q, mx::Shape{q[0], q[1], q[2]}};
}

}  // namespace mla
