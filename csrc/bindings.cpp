#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <string>
#include <vector>

#include "gpu_launch.h"
#include "mla_decode.h"
#include "mlx/version.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace {

std::string dotted(int major, int minor, int patch) {
  return std::to_string(major) + "." + std::to_string(minor) + "." + std::to_string(patch);
}

[[noreturn]] void import_error(const std::string& message) {
  PyErr_SetString(PyExc_ImportError, message.c_str());
  throw nb::python_error();
}

// The caller has compared the Python package's version; this compares the library that really got loaded, and whether
// mx.array can cross.
void check_runtime() {
  const auto built = dotted(MLX_VERSION_MAJOR, MLX_VERSION_MINOR, MLX_VERSION_PATCH);
  const std::string loaded = mlx::core::version();
  if (loaded != built) import_error("mla_tuner._native was built for mlx " + built + "; libmlx is " + loaded);
  if (!nb::type<mlx::core::array>().is_valid()) {
    import_error("mla_tuner._native was built with nanobind " +
                 dotted(NB_VERSION_MAJOR, NB_VERSION_MINOR, NB_VERSION_PATCH) + ", whose ABI differs from mlx.core's");
  }
}

nb::dict last_run() {
  const mla::Record run = mla::last_run();
  nb::dict d;
  d["ticket"] = run.ticket;
  d["partitions"] = run.partitions;
  d["tile"] = run.tile;
  d["isa"] = run.isa;
  d["threads"] = run.threads;
  d["tasks"] = run.tasks;
  return d;
}

#ifndef __APPLE__
mla::Pass pass(std::string name, std::vector<std::string> input_names, std::vector<std::string> output_names,
               std::string source, std::string header, int shared_memory, std::tuple<int, int, int> grid,
               std::tuple<int, int, int> threadgroup, const std::vector<std::vector<int>>& output_shapes,
               std::vector<mlx::core::Dtype> output_dtypes) {
  std::vector<mlx::core::Shape> shapes;
  for (const auto& shape : output_shapes) shapes.emplace_back(shape.begin(), shape.end());
  return {std::move(name),
          std::move(input_names),
          std::move(output_names),
          std::move(source),
          std::move(header),
          shared_memory,
          grid,
          threadgroup,
          std::move(shapes),
          std::move(output_dtypes)};
}

std::vector<mlx::core::array> launch(mla::GpuLaunch& self, const nb::args& arrays) {
  std::vector<mlx::core::array> inputs;
  inputs.reserve(arrays.size());
  for (nb::handle item : arrays) inputs.push_back(nb::cast<const mlx::core::array&>(item));
  return self(inputs);
}
#endif

// Dtypes and shapes as one key: tuples of them take five times as long to make, hash and compare in Python.
nb::bytes signature(const nb::args& arrays) {
  std::vector<int> key;
  key.reserve(32);
  for (nb::handle item : arrays) {
    const mlx::core::array* a = nullptr;
    if (!nb::try_cast(item, a, false)) throw nb::type_error("[signature] expected arrays or None");
    key.push_back(a ? int(a->ndim()) : -1);
    if (!a) continue;
    key.push_back(int(a->dtype().val()));
    key.insert(key.end(), a->shape().begin(), a->shape().end());
  }
  return nb::bytes(key.data(), key.size() * sizeof(int));
}

}  // namespace

NB_MODULE(_native, m) {
  m.doc() =
      "The CPU kernel as an MLX primitive, and what launches GPU kernels. mla_tuner.mla_decode is the front door.";
  m.def("check_runtime", &check_runtime, "Raises ImportError where the MLX in this process is not the one built for.");
  m.def("mla_decode", &mla::mla_decode, "q_nope"_a, "q_pe"_a.none(), "latent"_a, "k_pe"_a.none(),
        "block_tables"_a.none(), "lengths"_a, "starts"_a, "scale"_a, "partitions"_a, "tile"_a, "ticket"_a, "want_lse"_a,
        "Lazy decode attention: (out [batch, heads, q_len, rank], lse [batch, heads, q_len] float32).");
#ifndef __APPLE__
  nb::class_<mla::Pass>(m, "Pass", "A kernel and how it is launched, in the words of mlx.core.fast.cuda_kernel.")
      .def(nb::new_(&pass), nb::kw_only(), "name"_a, "input_names"_a, "output_names"_a, "source"_a, "header"_a,
           "shared_memory"_a, "grid"_a, "threadgroup"_a, "output_shapes"_a, "output_dtypes"_a);
  nb::class_<mla::GpuLaunch>(m, "GpuLaunch", "Launches a decode kernel and the merge of its results, if there is one.")
      .def(nb::init<mla::Pass, std::optional<mla::Pass>>(), "decode"_a, "merge"_a.none())
      .def("__call__", &launch, "inputs"_a, "Lazy: out and, if the last kernel has it, lse.");
#endif
  m.def("signature", &signature, "arrays"_a, "A key that is equal for arrays of equal dtypes and shapes.");
  m.def("last_run", &last_run, "How the call that finished last really ran; ticket 0: none yet.");
  m.def("isas", &mla::isas, "Instruction sets that run here, best first.");
  m.def("isa", &mla::isa, "The instruction set in use.");
  m.def("set_isa", &mla::set_isa, "name"_a, "Uses one of isas(); '' for the best.");
  m.def("threads", &mla::threads, "Threads a call may use.");
  m.def("set_threads", &mla::set_threads, "count"_a, "Sets threads(); the default is the cores this process may use.");
}
