// Multiprocessors that are made of fibers: every thread of a kernel is one, and the instructions that ptx*.cuh names
// are functions here, so that the kernels' own sources run on any machine.
//
// A block is an OS thread. Of its lanes one runs at a time, until it waits for something or gives way; who is next, how
// late the copy engine and the tensor cores are and how many blocks run at a time is drawn anew for every block, as
// much as a GPU may do and more. A hang, lanes that are not where their warp is, and addresses that an instruction
// of ptx*.cuh may not have, not aligned or not the block's, end the process with a report. Launches do not overlap,
// fences do nothing, and static shared variables begin with what the block before has left.
//
//   ANNULUS_PRETEND_SEED      another order of things: 0
//   ANNULUS_PRETEND_PATIENCE  seconds without progress that are a hang: 60
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>

namespace annulus::machine {

// ---- Grids

struct Grid {
  unsigned blocks = 0, threads = 0;
  std::size_t shared_bytes = 0;
  std::function<void()> kernel;  // what a thread does
};
void run(const Grid& grid);

[[noreturn]] void fail(const char* what);

// ---- Warps. All 32 lanes come to each of these; `what` tells which one they think it is

enum class Meeting {
  sync,
  shuffle,
  vote,
  load_matrix,
  store_matrix,
  product,
  wgmma,
  wgmma_fence,
  wgmma_commit,
  wgmma_wait,
  registers
};

constexpr std::size_t kMostExchanged = 24;  // bytes of a lane
void meet(Meeting what);
// Everybody's value, lane by lane, until the caller's next meeting.
const std::byte* exchange(Meeting what, const void* own, std::size_t bytes);
template <class T>
const T* exchange(Meeting what, const T& own) {
  static_assert(sizeof(T) <= kMostExchanged && std::is_trivially_copyable_v<T>);
  return reinterpret_cast<const T*>(exchange(what, &own, sizeof(T)));
}
unsigned lane();

// ---- Blocks

void block_sync(int barrier, int threads);
void block_arrive(int barrier, int threads);
// Others first: for who asks again and again.
void give_way();
// What others may wait for has changed.
void note_progress();

// ---- Shared memory, by addresses of 32 bits

void require_aligned(const void* place, std::size_t bytes);
std::uint32_t shared_address(const void* place);
std::byte* shared_place(std::uint32_t address, std::size_t bytes);

void mbarrier_init(std::uint32_t barrier, std::uint32_t count);
void mbarrier_arrive(std::uint32_t barrier, std::uint32_t expected_bytes);
bool mbarrier_passed(std::uint32_t barrier, std::uint32_t parity);
void mbarrier_wait(std::uint32_t barrier, std::uint32_t parity);

// The copy engine: `copy` happens some time, then so many bytes have come to a barrier.
void copy_later(std::function<void()> copy, std::uint32_t barrier, std::uint32_t bytes);

// Copies of one thread in groups (cp.async). Without `there` zeros arrive.
void copy_later(void* to, const void* from, std::size_t bytes, bool there);
void commit_copies();
void wait_copies(int pending);

// ---- mma.sync: D += A B, of 16 rows and 8 columns

enum class Number { bf16, fp16, tf32 };
void multiply_now(Number number, float* d, const std::uint32_t* a, const std::uint32_t* b);

// ---- wgmma

struct Operand {  // in shared memory
  std::uint64_t descriptor = 0;
  bool along = false;  // stored along its rows, not along the summed index
};
struct Product {  // of 16 rows a warp, 16 long
  int columns = 0;
  bool is_fp16 = false;
  bool accumulates = true;
  bool a_is_shared = false;
  Operand a, b;
};
// `d` and, unless it is in shared memory, `a` are the lane's registers, written and read some time before the wait.
void issue(const Product& product, float* d, const std::uint32_t* a);
void commit_products();
void wait_products(int pending);

}  // namespace annulus::machine
