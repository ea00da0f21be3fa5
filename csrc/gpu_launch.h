// A decode call on a GPU: one custom kernel of MLX, or two.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "mlx/array.h"
#include "mlx/fast.h"
#include "mlx/primitives.h"

namespace mla {

namespace mx = mlx::core;

// What mlx.fast.cuda_kernel takes to make a kernel, and what each of its launches takes but the inputs.
struct Pass {
  std::string name;
  std::vector<std::string> input_names, output_names;
  std::string source, header;
  int shared_memory;
  std::tuple<int, int, int> grid, threadgroup;  // threads, as MLX counts
  std::vector<mx::Shape> output_shapes;
  std::vector<mx::Dtype> output_dtypes;
};

// Launches a pass over the cache and, where there is one, the merge of its results. Python takes several times as long
// for the same: one call of MLX's a kernel, each with its arguments by name.
class GpuLaunch {
 public:
  GpuLaunch(Pass decode, std::optional<Pass> merge);
  // Lazy: the results of the last pass. The inputs are those of `decode`; `merge` takes its result and its last input.
  // They have as many dimensions and the same dtypes at every call. For one thread at a time: Python's lock is held.
  std::vector<mx::array> operator()(const std::vector<mx::array>& inputs);

 private:
  struct Kernel {
    explicit Kernel(Pass pass);
    std::vector<mx::array> launch(const std::vector<mx::array>& inputs);
    Pass pass;
    mx::fast::CustomKernelFunction function;
    std::shared_ptr<mx::Primitive> primitive;  // of the last stream that was the default one
  };
  Kernel decode_;
  std::optional<Kernel> merge_;
};

}  // namespace mla
