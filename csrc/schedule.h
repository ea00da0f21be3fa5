// Which thread-sized pieces a call is cut into.
#pragma once

#include <vector>

#include "cpu_decode.h"

namespace mla {

struct Schedule {
  int partitions = 1;           // pieces of the longest context
  int tile = 0;                 // rows a task
  std::vector<Task> tasks;      // a task's `sum` is null where it writes the answer itself
  std::vector<Partials> split;  // the sequences in more than one piece
  size_t partial_floats = 0;    // memory that their partial answers need
};

Schedule make_schedule(const Problem& problem, const Request& request, int threads);

// Hands out `memory`, partial_floats long, to the tasks of split sequences.
void place_partials(const Problem& problem, Schedule& schedule, float* memory);

// Rows a task where the caller doesn't say: all up to 128. With `units` (pieces of all sequences) leaving threads idle,
// 32 rows and more are cut into tasks of at least 16, one a thread if possible; each then converts the latent by
// itself.
int default_tile(int rows, int units, int threads);

}  // namespace mla
