// A decode call on a GPU: one custom kernel of MLX, or two.
#pragma once

#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "mlx/array.h"
#include "mlx/fast.h"

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
  std::vector<mx::array> operator()(const std::vector<mx::array>& inputs) const;

 private:
  struct Kernel {
    explicit Kernel(Pass pass);
    std::vector<mx::array> launch(const std::vector<mx::array>& inputs) const;
    Pass pass;
    mx::fast::CustomKernelFunction function;
  };
  Kernel decode_;
  std::optional<Kernel> merge_;
};

}  // namespace mla
