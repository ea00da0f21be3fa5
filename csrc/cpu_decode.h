// Absorbed-MLA decode on the CPU, without MLX: out = softmax(scale * [q_nope q_pe] [latent rope]^T) latent.
#pragma once

#include <string>
#include <vector>

#include "kernel.h"

namespace mla {

// How a call is asked to run.
struct Request {
  int partitions = 1;  // 1..256 pieces of the longest context
  int tile = 0;        // rows a task; 0: default_tile
  int ticket = 0;      // comes back in the record
};

// How a call really ran.
struct Record {
  int ticket = 0;      // 0: none yet
  int partitions = 0;  // pieces that the longest context was cut in
  int tile = 0;        // rows a task
  int threads = 0;
  int tasks = 0;
  std::string isa;
};

// Throws std::runtime_error where a block table names a block that is not there; nothing is written then.
void decode(const Problem& problem, const Request& request);

Record last_run();                      // of the call that finished last
std::vector<std::string> isas();        // what this CPU runs, best first
std::string isa();                      // the one in use
void set_isa(const std::string& name);  // "" for the best; throws std::invalid_argument for one that isn't in isas()
int threads();
void set_threads(int count);  // the default is the number of cores that this process may use

}  // namespace mla
