#include "pretend_lanes/machine.h"

#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <memory>
#include <mutex>
#include <random>
#include <thread>
#include <unordered_map>
#include <vector>

#include "pretend_lanes/fiber.h"
#include "pretend_lanes/order.h"
#include "pretend_lanes/products.h"
#include "support/walled_gpu.h"

#include "device.h"

// Where kernels find their dynamic shared memory (`extern __shared__`), of one block at a time.
namespace annulus {
constexpr std::size_t kSharedBytes = 228 << 10;
namespace cuda::sm90 {
alignas(1024) thread_local std::uint8_t raw[kSharedBytes];
}
namespace cuda::mma {
alignas(1024) thread_local std::uint8_t raw[kSharedBytes];
namespace gradients {
alignas(1024) thread_local std::uint8_t raw[kSharedBytes];
}
}  // namespace cuda::mma
}  // namespace annulus

thread_local constinit dim3 threadIdx, blockIdx, blockDim, gridDim;

namespace annulus::machine {
namespace {

using Clock = std::chrono::steady_clock;

constexpr int kWarpLanes = 32;
constexpr int kBarriers = 16;
constexpr std::uint32_t kFirstAddress = 1024;  // of shared memory: 0 is no place

long number_from(const char* variable, long otherwise) {
  const char* const text = std::getenv(variable);
  return text == nullptr ? otherwise : std::atol(text);
}

// How late things are.
enum class Pace { at_once, by_chance, at_last };

struct Warp;

struct Lane {
  Fiber fiber;
  unsigned index = 0;  // in the block
  Warp* warp = nullptr;
  const char* waits_for = nullptr;
  std::uint32_t waits_at = 0;
  bool has_ended = false;
  struct Copy {
    void* to;
    const void* from;
    std::size_t bytes;
  };
  std::deque<std::vector<Copy>> copies;  // groups, the last one open
};

struct Warp {
  std::vector<Lane*> ready;
  bool is_queued = false;
  int arrived = 0;
  Meeting meeting{};
  std::vector<Lane*> waiting;
  unsigned turn = 0;
  alignas(16) std::byte slots[2][kWarpLanes][kMostExchanged];
  struct Issued {
    Product product;
    Fragments fragments;
  };
  std::deque<std::vector<Issued>> products;  // groups, the last one open
};

struct NamedBarrier {
  int arrived = 0, expected = 0;
  std::vector<Lane*> waiting;
};

// As it lies in shared memory.
struct Mbarrier {
  std::uint16_t pending;
  std::uint16_t count : 15;
  std::uint16_t phase : 1;
  std::int32_t bytes;  // still to come
};
static_assert(sizeof(Mbarrier) == 8);
constexpr unsigned kNoCount = 0x7fff;  // of memory that is poisoned

struct LateCopy {
  std::function<void()> copy;
  std::uint32_t barrier, bytes;
};

struct GridState {
  const Grid& grid;
  std::atomic<unsigned> next_block{0};
  std::atomic<std::uint64_t> progress{0};
};

class Block;
thread_local constinit Block* block = nullptr;
thread_local constinit Lane* self = nullptr;

class Block {
 public:
  Block(GridState& grid, std::vector<Lane>& lanes, std::uint64_t seed) : grid_(grid), lanes_(lanes), random_(seed) {
    pace_ = static_cast<Pace>(random_() % 3);
    product_pace_ = random_() % 2 == 0 ? Pace::at_once : Pace::at_last;
  }

  void run(unsigned index) {
    const Grid& grid = grid_.grid;
    block = this;
    blockIdx = {index};
    blockDim = {grid.threads};
    gridDim = {grid.blocks};
    for (std::uint8_t* raw : {cuda::sm90::raw, cuda::mma::raw, cuda::mma::gradients::raw})
      std::memset(raw, 0xff, std::min(grid.shared_bytes, kSharedBytes));
    warps_ = std::vector<Warp>(grid.threads / kWarpLanes);
    live_ = grid.threads;
    for (unsigned i = 0; i < grid.threads; ++i) {
      Lane& lane = lanes_[i];
      lane.index = i;
      lane.warp = &warps_[i / kWarpLanes];
      lane.waits_for = nullptr;
      lane.has_ended = false;
      lane.copies.clear();
      lane.fiber.start([](void* of) { static_cast<Block*>(of)->live(); }, this);
      make_ready(&lane);
    }
    while (live_ > 0) step();
    hear(&live_);
    if (!copies_.empty()) fail("a block ends while the copy engine still brings something");
    for (const Warp& warp : warps_)
      for (const auto& group : warp.products)
        if (!group.empty()) fail("a block ends while products are under way");
    block = nullptr;
  }

  // ---- Of the lane that runs

  void wait(const char* what, std::uint32_t at) {
    self->waits_for = what;
    self->waits_at = at;
    leave();
    self->waits_for = nullptr;
  }
  void give_way() {
    polling_.push_back(self);
    wait("something that it asks for", 0);
  }
  template <class F>
  void meet(Meeting what, F last) {
    Warp& warp = *self->warp;
    if (warp.arrived == 0) warp.meeting = what;
    if (warp.meeting != what) fail("lanes of a warp are at different instructions that all of them take part in");
    void* const meeting = &warp.slots[warp.turn % 2];
    tell(meeting);
    if (++warp.arrived < kWarpLanes) {
      warp.waiting.push_back(self);
      wait("its warp", static_cast<std::uint32_t>(what));
      return hear(meeting);
    }
    hear(meeting);
    last(warp);
    tell(meeting);
    warp.arrived = 0;
    ++warp.turn;
    wake(warp.waiting);
  }
  void sync(int id, int threads) {
    NamedBarrier& barrier = barriers_[id];
    barrier.waiting.push_back(self);
    if (!arrive(id, threads)) wait("a named barrier", static_cast<std::uint32_t>(id));
    hear(&barrier);
  }
  // Whether it was the last.
  bool arrive(int id, int threads) {
    NamedBarrier& barrier = barriers_[id];
    tell(&barrier);
    if (barrier.arrived == 0) barrier.expected = threads;
    if (barrier.expected != threads) fail("a named barrier for different numbers of threads");
    if (++barrier.arrived < threads) return false;
    barrier.arrived = 0;
    std::erase(barrier.waiting, self);
    wake(barrier.waiting);
    return true;
  }

  // ---- mbarriers

  Mbarrier& at(std::uint32_t address) {
    if (address % 8 != 0) fail("an mbarrier that is not at a multiple of 8");
    return *reinterpret_cast<Mbarrier*>(shared_place(address, sizeof(Mbarrier)));
  }
  void arrive_at(std::uint32_t address, std::uint32_t arrivals, std::int32_t bytes) {
    Mbarrier& barrier = at(address);
    if (barrier.count == kNoCount) fail("an arrival at an mbarrier that nobody has made");
    tell(&barrier);
    if (barrier.pending < arrivals) fail("more arrivals at an mbarrier than it counts");
    barrier.pending = static_cast<std::uint16_t>(barrier.pending - arrivals);
    barrier.bytes += bytes;
    if (barrier.pending > 0 || barrier.bytes != 0) return;
    barrier.pending = barrier.count;
    barrier.phase ^= 1;
    note_progress();
    if (const auto found = sleepers_.find(address); found != sleepers_.end()) wake(found->second);
  }
  void sleep_at(std::uint32_t address) {
    sleepers_[address].push_back(self);
    wait("an mbarrier", address);
  }

  // ---- Copies and products

  void copy_later(LateCopy copy) {
    tell(&copies_);
    copies_.push_back(std::move(copy));
    if (pace_ == Pace::at_once) copy_one(copies_.size() - 1);
  }
  bool products_are_late() const { return product_pace_ == Pace::at_last; }

  void note_progress() { grid_.progress.fetch_add(1, std::memory_order_relaxed); }
  std::size_t shared_bytes() const { return grid_.grid.shared_bytes; }

  void report(const char* what) const {
    std::fprintf(stderr, "pretend GPU, block %u of %u, lane %u: %s\n", blockIdx.x, gridDim.x,
                 self == nullptr ? 0 : self->index, what);
    for (unsigned i = 0, first = 0; i < lane_count(); first = i) {
      const Lane& lane = lanes_[i];
      const auto like = [&](const Lane& other) {
        return other.has_ended == lane.has_ended && other.waits_for == lane.waits_for &&
               other.waits_at == lane.waits_at;
      };
      while (i < lane_count() && like(lanes_[i])) ++i;
      std::fprintf(stderr, "  lanes %u to %u: %s", first, i - 1,
                   lane.has_ended              ? "have ended"
                   : lane.waits_for == nullptr ? "could go on"
                                               : "wait for ");
      if (!lane.has_ended && lane.waits_for != nullptr) std::fprintf(stderr, "%s (%u)", lane.waits_for, lane.waits_at);
      std::fprintf(stderr, "\n");
    }
  }

 private:
  unsigned lane_count() const { return grid_.grid.threads; }

  void live() {
    grid_.grid.kernel();
    tell(&live_);
    self->has_ended = true;
    --live_;
    note_progress();
    leave();
  }
  void leave() { self->fiber.leave(); }

  void make_ready(Lane* lane) {
    Warp& warp = *lane->warp;
    warp.ready.push_back(lane);
    if (std::exchange(warp.is_queued, true)) return;
    ready_.push_back(&warp);
  }
  void wake(std::vector<Lane*>& lanes) {
    for (Lane* const lane : lanes) make_ready(lane);
    lanes.clear();
  }

  // A warp at a time, as far as its lanes get without others; which of its lanes is first is anybody's guess.
  void step() {
    if (!ready_.empty()) {
      if (pace_ != Pace::at_once && random_() % 4 == 0) std::swap(ready_.front(), ready_[random_() % ready_.size()]);
      Warp& warp = *ready_.front();
      ready_.pop_front();
      while (!warp.ready.empty()) {
        if (pace_ != Pace::at_once && random_() % 8 == 0)
          std::swap(warp.ready.back(), warp.ready[random_() % warp.ready.size()]);
        self = warp.ready.back();
        warp.ready.pop_back();
        threadIdx = {self->index};
        self->fiber.enter();
      }
      self = nullptr;
      warp.is_queued = false;
      if (pace_ != Pace::by_chance || random_() % 8 != 0) return;
      if (!copies_.empty()) copy_one(random_() % copies_.size());
      wake(polling_);
      return;
    }
    if (!copies_.empty()) return copy_one(random_() % copies_.size());
    if (polling_.empty()) fail("nobody can go on");
    wake(polling_);
    const std::uint64_t progress = grid_.progress.load(std::memory_order_relaxed);
    const auto now = Clock::now();
    if (progress != seen_progress_) {
      seen_progress_ = progress;
      seen_at_ = now;
    }
    static const auto patience = std::chrono::seconds(number_from("ANNULUS_PRETEND_PATIENCE", 60));
    if (now - seen_at_ > patience) fail("nothing has happened for as long as ANNULUS_PRETEND_PATIENCE allows");
    std::this_thread::yield();
  }

  void copy_one(std::size_t which) {
    const LateCopy copy = std::move(copies_[which]);
    copies_.erase(copies_.begin() + static_cast<std::ptrdiff_t>(which));
    hear(&copies_);
    copy.copy();
    arrive_at(copy.barrier, 0, -static_cast<std::int32_t>(copy.bytes));
  }

  GridState& grid_;
  std::vector<Lane>& lanes_;
  std::minstd_rand random_;
  Pace pace_, product_pace_;
  std::vector<Warp> warps_;
  NamedBarrier barriers_[kBarriers];
  std::unordered_map<std::uint32_t, std::vector<Lane*>> sleepers_;
  std::deque<Warp*> ready_;
  std::vector<Lane*> polling_;
  std::vector<LateCopy> copies_;
  unsigned live_ = 0;
  std::uint64_t seen_progress_ = ~std::uint64_t{0};
  Clock::time_point seen_at_;
};

// Lanes, with their stacks, are kept from grid to grid.
class LanePool {
 public:
  using Lanes = std::vector<Lane>;
  std::unique_ptr<Lanes> take(unsigned count) {
    std::unique_ptr<Lanes> lanes;
    {
      const std::lock_guard lock(mutex_);
      if (!free_.empty()) {
        lanes = std::move(free_.back());
        free_.pop_back();
      }
    }
    if (lanes == nullptr) lanes = std::make_unique<Lanes>();
    if (lanes->size() < count) *lanes = Lanes(count);
    return lanes;
  }
  void give_back(std::unique_ptr<Lanes> lanes) {
    const std::lock_guard lock(mutex_);
    free_.push_back(std::move(lanes));
  }
  static LanePool& instance() {
    static auto& pool = *new LanePool;
    return pool;
  }

 private:
  std::mutex mutex_;
  std::vector<std::unique_ptr<Lanes>> free_;
};

}  // namespace

void fail(const char* what) {
  if (block != nullptr)
    block->report(what);
  else
    std::fprintf(stderr, "pretend GPU: %s\n", what);
  std::abort();
}

void run(const Grid& grid) {
  if (grid.threads % kWarpLanes != 0) fail("blocks of a number of threads that is no multiple of 32");
  if (grid.shared_bytes > kSharedBytes - 1024) fail("more shared memory than a block can have");
  static std::atomic<std::uint64_t> grids{0};
  static const auto seed = static_cast<std::uint64_t>(number_from("ANNULUS_PRETEND_SEED", 0));
  const std::uint64_t number = grids.fetch_add(1) + 1;
  constexpr unsigned kMostAtOnce = 4;
  std::minstd_rand random(static_cast<unsigned>(number * 7919 + seed));
  random.discard(2);
  const unsigned at_once = std::min(grid.blocks, 1 + static_cast<unsigned>(random() % kMostAtOnce));
  GridState state{grid};
  const support::OpenWalls open;
  const auto multiprocessor = [&] {
    auto lanes = LanePool::instance().take(grid.threads);
    for (unsigned index; (index = state.next_block.fetch_add(1)) < grid.blocks;) {
      auto of_grid = std::make_unique<Block>(state, *lanes, (seed + number) * 65537 + index);
      of_grid->run(index);
    }
    LanePool::instance().give_back(std::move(lanes));
  };
  std::vector<std::jthread> others;
  for (unsigned i = 1; i < at_once; ++i) others.emplace_back(multiprocessor);
  multiprocessor();
}

// ---- Warps

unsigned lane() { return self->index % kWarpLanes; }

void meet(Meeting what) {
  block->meet(what, [](Warp&) {});
}

const std::byte* exchange(Meeting what, const void* own, std::size_t bytes) {
  Warp& warp = *self->warp;
  std::byte* const all = warp.slots[warp.turn % 2][0];
  std::memcpy(all + lane() * bytes, own, bytes);
  meet(what);
  return all;
}

// ---- Blocks

void block_sync(int barrier, int threads) { block->sync(barrier, threads); }
void block_arrive(int barrier, int threads) { block->arrive(barrier, threads); }
void give_way() { block->give_way(); }
void note_progress() { block->note_progress(); }

// ---- Shared memory

void require_aligned(const void* place, std::size_t bytes) {
  if (reinterpret_cast<std::uintptr_t>(place) % bytes != 0) fail("an address that is not aligned for its instruction");
}
std::uint32_t shared_address(const void* place) {
  return static_cast<std::uint32_t>(static_cast<const std::uint8_t*>(place) - cuda::sm90::raw) + kFirstAddress;
}
std::byte* shared_place(std::uint32_t address, std::size_t bytes) {
  if (address < kFirstAddress || address - kFirstAddress + bytes > block->shared_bytes())
    fail("an address outside of the block's shared memory");
  return reinterpret_cast<std::byte*>(cuda::sm90::raw + (address - kFirstAddress));
}

void mbarrier_init(std::uint32_t barrier, std::uint32_t count) {
  block->at(barrier) = {static_cast<std::uint16_t>(count), static_cast<std::uint16_t>(count & 0x7fff), 0, 0};
}
void mbarrier_arrive(std::uint32_t barrier, std::uint32_t expected_bytes) {
  block->arrive_at(barrier, 1, static_cast<std::int32_t>(expected_bytes));
}
bool mbarrier_passed(std::uint32_t barrier, std::uint32_t parity) {
  Mbarrier& of = block->at(barrier);
  if (of.count == kNoCount) fail("an mbarrier that nobody has made");
  if (of.phase == parity) return false;
  hear(&of);
  return true;
}
void mbarrier_wait(std::uint32_t barrier, std::uint32_t parity) {
  while (!mbarrier_passed(barrier, parity)) block->sleep_at(barrier);
}

void copy_later(std::function<void()> copy, std::uint32_t barrier, std::uint32_t bytes) {
  block->copy_later({std::move(copy), barrier, bytes});
}

namespace {
void arrive(const Lane::Copy& copy) {
  if (copy.from == nullptr)
    std::memset(copy.to, 0, copy.bytes);
  else
    std::memcpy(copy.to, copy.from, copy.bytes);
}
}  // namespace

void copy_later(void* to, const void* from, std::size_t bytes, bool there) {
  require_aligned(to, bytes);
  if (there) require_aligned(from, bytes);
  const Lane::Copy copy{to, there ? from : nullptr, bytes};
  if (self->copies.empty()) self->copies.emplace_back();
  if (block->products_are_late())
    self->copies.back().push_back(copy);
  else
    arrive(copy);
}
void commit_copies() { self->copies.emplace_back(); }
void wait_copies(int pending) {
  while (static_cast<int>(self->copies.size()) > pending + 1) {
    for (const Lane::Copy& copy : self->copies.front()) arrive(copy);
    self->copies.pop_front();
  }
}

// ---- Products

namespace {

// What each lane shows the one that comes last, which then does it for all.
template <class Registers, class F>
void meet_with(Meeting what, const Registers& own, F last) {
  static_assert(sizeof(Registers) <= kMostExchanged);
  std::byte* const all = self->warp->slots[self->warp->turn % 2][0];
  std::memcpy(all + lane() * sizeof(Registers), &own, sizeof(Registers));
  block->meet(what, [&](Warp& warp) { last(warp, reinterpret_cast<const Registers*>(all)); });
}

}  // namespace

void multiply_now(Number number, float* d, const std::uint32_t* a, const std::uint32_t* b) {
  meet_with(Meeting::product, LaneRegisters{d, a, b},
            [number](Warp&, const LaneRegisters* lanes) { multiply(number, lanes); });
}

void issue(const Product& product, float* d, const std::uint32_t* a) {
  struct Registers {
    float* d;
    const std::uint32_t* a;
  };
  meet_with(Meeting::wgmma, Registers{d, a}, [&](Warp& warp, const Registers* lanes) {
    Warp::Issued issued{product, {}};
    issued.fragments.first_row = static_cast<int>(self->index / kWarpLanes % 4) * 16;
    for (int i = 0; i < kWarpLanes; ++i) {
      issued.fragments.d[i] = lanes[i].d;
      issued.fragments.a[i] = lanes[i].a;
    }
    if (warp.products.empty()) warp.products.emplace_back();
    if (block->products_are_late())
      warp.products.back().push_back(issued);
    else
      multiply(issued.product, issued.fragments);
  });
}
void commit_products() {
  block->meet(Meeting::wgmma_commit, [](Warp& of) { of.products.emplace_back(); });
}
void wait_products(int pending) {
  block->meet(Meeting::wgmma_wait, [pending](Warp& of) {
    while (static_cast<int>(of.products.size()) > pending + 1) {
      for (const Warp::Issued& issued : of.products.front()) multiply(issued.product, issued.fragments);
      of.products.pop_front();
    }
  });
}

}  // namespace annulus::machine
