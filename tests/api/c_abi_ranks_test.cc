// Ranks through the C ABI: the bits of one rank, the numbers of C++, and a sentence for everything that fails. The
// transport is C functions over the thread transport.
#include "annulus/annulus_ranks.h"

#include <barrier>
#include <cstring>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include <gtest/gtest.h>

#include "annulus/ranks.h"
#include "annulus/thread_group.h"

extern "C" int annulus_ranks_in_c(int64_t* received_bytes);

namespace annulus {
namespace {

using testing::AssertionFailure;
using testing::AssertionResult;
using testing::AssertionSuccess;

constexpr std::int64_t kTokens = 37, kHeads = 2, kHeadDim = 8;

AssertionResult succeeds(int status) {
  if (status == ANNULUS_OK) return AssertionSuccess();
  return AssertionFailure() << "status " << status << ": " << annulus_last_error();
}

AssertionResult fails(int status, int expected, const std::vector<std::string>& parts) {
  const std::string message = annulus_last_error();
  if (status != expected)
    return AssertionFailure() << "status " << status << " instead of " << expected << ": " << message;
  for (const std::string& part : parts)
    if (message.find(part) == std::string::npos) return AssertionFailure() << "no '" << part << "' in: " << message;
  return AssertionSuccess();
}

const annulus_branch kBranches[] = {
    {.segment = 8, .dilation = 1, .first_head = 0, .head_count = 0, .classes = nullptr, .class_count = 0},
    {.segment = 30, .dilation = 3, .first_head = 0, .head_count = 0, .classes = nullptr, .class_count = 0}};

annulus_problem problem() {
  annulus_problem result{};
  result.struct_size = sizeof result;
  result.batch = 1;
  result.tokens = kTokens;
  result.heads = kHeads;
  result.head_dim = kHeadDim;
  result.branches = kBranches;
  result.branch_count = 2;
  return result;
}

Problem cpp_problem() {
  return {.tokens = kTokens,
          .heads = kHeads,
          .head_dim = kHeadDim,
          .pattern = make_pattern(Preset::longnet, {8, 30}, {1, 3}, kHeads),
          .scale = {},
          .documents = {}};
}

annulus_sharding sharding(int ranks, int layout = ANNULUS_LAYOUT_CONTIGUOUS) {
  annulus_sharding result{};
  result.struct_size = sizeof result;
  result.ranks = ranks;
  result.layout = layout;
  return result;
}

annulus_rank_options rank_options(int strategy, bool reproducible) {
  annulus_rank_options result{};
  result.struct_size = sizeof result;
  result.strategy = strategy;
  result.reproducible = reproducible;
  return result;
}

// What a C program would write over its own messenger.
int told(const char* text, char* message, std::size_t capacity) {
  std::snprintf(message, capacity, "%s", text);
  return 7;
}

template <class F>
int guarded(F f, char* message, std::size_t capacity) {
  try {
    f();
    return 0;
  } catch (const std::exception& error) {
    return told(error.what(), message, capacity);
  }
}

int post(void* context, const annulus_exchange* exchange, char* message, std::size_t capacity) {
  Exchange handed{.plan = exchange->plan, .step = exchange->step, .sends = {}, .receives = {}};
  for (std::int64_t i = 0; i < exchange->send_count; ++i) {
    const annulus_message& send = exchange->sends[i];
    handed.sends.push_back({send.peer, {{.data = static_cast<std::byte*>(send.data), .run_bytes = send.bytes}}});
  }
  for (std::int64_t i = 0; i < exchange->receive_count; ++i) {
    const annulus_message& receive = exchange->receives[i];
    handed.receives.push_back(
        {receive.peer, {static_cast<std::byte*>(receive.data), static_cast<std::size_t>(receive.bytes)}});
  }
  return guarded([&] { static_cast<Transport*>(context)->post(handed); }, message, capacity);
}

int wait(void* context, char* message, std::size_t capacity) {
  return guarded([&] { static_cast<Transport*>(context)->wait(); }, message, capacity);
}

int poll(void* context, char* message, std::size_t capacity) {
  return guarded([&] { static_cast<Transport*>(context)->poll(); }, message, capacity);
}

void abort(void* context, const char* text) { static_cast<Transport*>(context)->abort(text); }

annulus_transport_callbacks callbacks(Transport& transport) {
  return {.struct_size = sizeof(annulus_transport_callbacks),
          .context = &transport,
          .rank = transport.rank(),
          .size = transport.size(),
          .post = post,
          .wait = wait,
          .poll = poll,
          .abort = abort,
          .arrived = nullptr};
}

annulus_transport_callbacks looking_ahead(int rank, int size) {
  annulus_transport_callbacks result{};
  result.struct_size = sizeof result;
  result.rank = rank;
  result.size = size;
  return result;
}

// Handles of one rank that let go of themselves, in the right order.
struct Rank {
  annulus_transport* transport = nullptr;
  annulus_rank_attention* attention = nullptr;
  Rank() = default;
  Rank(const Rank&) = delete;
  Rank& operator=(const Rank&) = delete;
  ~Rank() {
    annulus_rank_destroy(attention);
    annulus_transport_destroy(transport);
  }
};

std::vector<float> draw(std::size_t count, unsigned seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  std::vector<float> values(count);
  for (float& value : values) value = normal(random);
  return values;
}

// All tensors of a problem or of a rank's rows of it: q, k, v, dout are drawn, the rest are results.
struct Tensors {
  static constexpr std::size_t kRow = kHeads * kHeadDim;
  explicit Tensors(std::int64_t rows_) : rows(rows_) {
    for (auto* tensor : {&q, &k, &v, &dout, &out, &dq, &dk, &dv}) tensor->resize(static_cast<std::size_t>(rows) * kRow);
    lse.resize(static_cast<std::size_t>(rows) * kHeads);
  }
  annulus_tensor view(std::vector<float>& tensor) const {
    return {.data = tensor.data(), .dtype = ANNULUS_FP32, .shape = {1, rows, kHeads, kHeadDim}, .stride = {}};
  }
  annulus_forward_args forward() {
    annulus_forward_args args{};
    args.struct_size = sizeof args;
    args.q = view(q), args.k = view(k), args.v = view(v), args.out = view(out);
    args.lse = lse.data(), args.lse_count = lse.size();
    return args;
  }
  annulus_backward_args backward() {
    annulus_backward_args args{};
    args.struct_size = sizeof args;
    args.q = view(q), args.k = view(k), args.v = view(v), args.out = view(out), args.dout = view(dout);
    args.dq = view(dq), args.dk = view(dk), args.dv = view(dv);
    args.lse = lse.data(), args.lse_count = lse.size();
    return args;
  }

  std::int64_t rows;
  std::vector<float> q, k, v, dout, out, dq, dk, dv, lse;
};

Tensors one_rank() {
  Tensors whole(kTokens);
  unsigned seed = 0;
  for (auto* tensor : {&whole.q, &whole.k, &whole.v, &whole.dout}) *tensor = draw(tensor->size(), ++seed);
  annulus_attention* attention = nullptr;
  const annulus_problem given = problem();
  EXPECT_TRUE(succeeds(annulus_create(&given, nullptr, &attention)));
  const auto forward = whole.forward();
  EXPECT_TRUE(succeeds(annulus_forward(attention, &forward)));
  const auto backward = whole.backward();
  EXPECT_TRUE(succeeds(annulus_backward(attention, &backward)));
  annulus_destroy(attention);
  return whole;
}

std::vector<std::int64_t> positions(const annulus_sharding& shards, int rank) {
  std::size_t count = 0;
  EXPECT_TRUE(succeeds(annulus_positions(&shards, kTokens, rank, nullptr, 0, &count)));
  std::vector<std::int64_t> result(count);
  EXPECT_TRUE(succeeds(annulus_positions(&shards, kTokens, rank, result.data(), count, &count)));
  return result;
}

void run_rank(Transport& thread_transport, const annulus_sharding& shards, const Tensors& whole) {
  Rank rank;
  const annulus_transport_callbacks functions = callbacks(thread_transport);
  ASSERT_TRUE(succeeds(annulus_transport_create(&functions, &rank.transport)));
  const annulus_problem given = problem();
  const annulus_rank_options options = rank_options(ANNULUS_STRATEGY_AUTO, true);
  ASSERT_TRUE(succeeds(annulus_rank_create(&given, &shards, rank.transport, &options, &rank.attention)));

  const std::vector<std::int64_t> mine = positions(shards, functions.rank);
  std::int64_t rows = -1, query_rows = -1;
  ASSERT_TRUE(succeeds(annulus_rank_rows(rank.attention, &rows, &query_rows)));
  ASSERT_EQ(rows, static_cast<std::int64_t>(mine.size()));
  ASSERT_EQ(query_rows, rows);
  Tensors own(rows);
  const auto row = [](const std::vector<float>& tensor, std::int64_t i) {
    return tensor.begin() + i * static_cast<std::int64_t>(Tensors::kRow);
  };
  const auto take = [&](const std::vector<float>& from, std::vector<float>& to) {
    for (std::size_t i = 0; i < mine.size(); ++i)
      std::copy_n(row(from, mine[i]), Tensors::kRow, to.begin() + static_cast<std::ptrdiff_t>(i * Tensors::kRow));
  };
  take(whole.q, own.q), take(whole.k, own.k), take(whole.v, own.v), take(whole.dout, own.dout);
  const auto forward = own.forward();
  ASSERT_TRUE(succeeds(annulus_rank_forward(rank.attention, &forward)));
  const auto backward = own.backward();
  ASSERT_TRUE(succeeds(annulus_rank_backward(rank.attention, &backward)));
  const auto same = [&](const std::vector<float>& all, std::vector<float>& ours) {
    std::vector<float> expected(ours.size());
    take(all, expected);
    return expected == ours;
  };
  EXPECT_TRUE(same(whole.out, own.out));
  EXPECT_TRUE(same(whole.dq, own.dq));
  EXPECT_TRUE(same(whole.dk, own.dk));
  EXPECT_TRUE(same(whole.dv, own.dv));
}

TEST(CRanks, ReproducibleBitsAreThoseOfOneRank) {
  const Tensors whole = one_rank();
  const std::int64_t uneven[] = {0, 5, 5, kTokens};
  for (const int layout : {ANNULUS_LAYOUT_CONTIGUOUS, ANNULUS_LAYOUT_ZIGZAG, ANNULUS_LAYOUT_STRIPED}) {
    annulus_sharding shards = sharding(3, layout);
    if (layout == ANNULUS_LAYOUT_CONTIGUOUS) shards.boundaries = uneven, shards.boundary_count = 4;
    const auto transports = make_thread_group(3);
    std::vector<std::thread> threads;
    for (const auto& transport : transports) threads.emplace_back([&] { run_rank(*transport, shards, whole); });
    for (std::thread& thread : threads) thread.join();
  }
}

TEST(CRanks, LookingAheadKnowsWhatCppKnows) {
  Rank rank;
  const annulus_transport_callbacks none = looking_ahead(1, 3);
  ASSERT_TRUE(succeeds(annulus_transport_create(&none, &rank.transport)));
  const annulus_problem given = problem();
  const annulus_sharding shards = sharding(3);
  const annulus_rank_options options = rank_options(ANNULUS_STRATEGY_RING, false);
  ASSERT_TRUE(succeeds(annulus_rank_create(&given, &shards, rank.transport, &options, &rank.attention)));

  const auto transports = make_thread_group(3);
  std::vector<std::unique_ptr<RankAttention>> ranks(3);
  std::vector<std::thread> threads;
  for (std::size_t i = 0; i < 3; ++i)
    threads.emplace_back([&, i] {
      ranks[i] = std::make_unique<RankAttention>(cpp_problem(), Sharding{.ranks = 3}, *transports[i],
                                                 RankOptions{.strategy = Strategy::ring});
    });
  for (std::thread& thread : threads) thread.join();
  for (const int pass : {ANNULUS_FORWARD, ANNULUS_BACKWARD}) {
    std::int64_t sent = -1, received = -1;
    ASSERT_TRUE(succeeds(annulus_rank_traffic(rank.attention, pass, &sent, &received)));
    EXPECT_EQ((RankTraffic{sent, received}), ranks[1]->traffic(static_cast<Pass>(pass)));
    EXPECT_GT(received, 0);
    std::size_t bytes = 0, count = 0;
    ASSERT_TRUE(succeeds(annulus_rank_workspace_bytes(rank.attention, pass, &bytes)));
    EXPECT_EQ(bytes, ranks[1]->workspace_bytes(static_cast<Pass>(pass)));
    ASSERT_TRUE(succeeds(annulus_rank_memory(rank.attention, pass, nullptr, 0, &count)));
    std::vector<annulus_memory_component> components(count);
    ASSERT_TRUE(succeeds(annulus_rank_memory(rank.attention, pass, components.data(), count, &count)));
    const std::vector<MemoryComponent> expected = ranks[1]->memory(static_cast<Pass>(pass));
    ASSERT_EQ(components.size(), expected.size());
    for (std::size_t i = 0; i < count; ++i)
      EXPECT_EQ((MemoryComponent{components[i].name, components[i].bytes}), expected[i]);
  }
  char text[4096];
  ASSERT_TRUE(succeeds(annulus_rank_explain(rank.attention, text, sizeof text, nullptr)));
  EXPECT_NE(std::string(text).find("3 ranks, layout contiguous, strategy ring"), std::string::npos) << text;

  std::int64_t rows = 0, query_rows = 0;
  ASSERT_TRUE(succeeds(annulus_rank_rows(rank.attention, &rows, &query_rows)));
  Tensors own(rows);
  const auto forward = own.forward();
  EXPECT_TRUE(fails(annulus_rank_forward(rank.attention, &forward), ANNULUS_INVALID_ARGUMENT, {"without a carrier"}));
}

TEST(CRanks, HowGpusMovePayloadIsChecked) {
  Rank rank;
  const annulus_transport_callbacks none = looking_ahead(0, 2);
  ASSERT_TRUE(succeeds(annulus_transport_create(&none, &rank.transport)));
  const annulus_problem given = problem();
  const annulus_sharding shards = sharding(2);
  const auto create = [&](int payload, std::int64_t timeout_ms) {
    annulus_rank_options options = rank_options(ANNULUS_STRATEGY_AUTO, false);
    options.payload = payload;
    options.timeout_ms = timeout_ms;
    return annulus_rank_create(&given, &shards, rank.transport, &options, &rank.attention);
  };
  EXPECT_TRUE(fails(create(3, 0), ANNULUS_INVALID_ARGUMENT, {"payload", "from 0 to 2", "got 3"}));
  EXPECT_TRUE(fails(create(ANNULUS_PAYLOAD_NCCL, -1), ANNULUS_INVALID_ARGUMENT, {"timeout_ms", "-1"}));
}

TEST(CRanks, WhatACallbackSaysIsTheError) {
  const auto transports = make_thread_group(2);
  annulus_transport_callbacks functions = callbacks(*transports[0]);
  functions.poll = nullptr;
  functions.post = [](void*, const annulus_exchange*, char* message, std::size_t capacity) {
    return told("the network cable is out", message, capacity);
  };
  const annulus_problem given = problem();
  const annulus_sharding shards = sharding(2);
  Rank rank;
  ASSERT_TRUE(succeeds(annulus_transport_create(&functions, &rank.transport)));
  const auto create = [&] { return annulus_rank_create(&given, &shards, rank.transport, nullptr, &rank.attention); };
  EXPECT_TRUE(fails(create(), ANNULUS_TRANSPORT_ERROR, {"the network cable is out"}));
  EXPECT_TRUE(fails(create(), ANNULUS_TRANSPORT_ERROR, {"the network cable is out"}));
  EXPECT_EQ(rank.attention, nullptr);

  functions.post = [](void*, const annulus_exchange*, char*, std::size_t) { return 3; };
  Rank silent;
  ASSERT_TRUE(succeeds(annulus_transport_create(&functions, &silent.transport)));
  EXPECT_TRUE(fails(annulus_rank_create(&given, &shards, silent.transport, nullptr, &silent.attention),
                    ANNULUS_TRANSPORT_ERROR, {"post", "code 3"}));
}

TEST(CRanks, RanksThatDisagreeAreBothTold) {
  const auto transports = make_thread_group(2);
  std::vector<std::thread> threads;
  for (int i = 0; i < 2; ++i)
    threads.emplace_back([&, i] {
      Rank rank;
      const annulus_transport_callbacks functions = callbacks(*transports[static_cast<std::size_t>(i)]);
      ASSERT_TRUE(succeeds(annulus_transport_create(&functions, &rank.transport)));
      annulus_problem given = problem();
      given.causal = i;
      const annulus_sharding shards = sharding(2);
      EXPECT_TRUE(fails(annulus_rank_create(&given, &shards, rank.transport, nullptr, &rank.attention),
                        ANNULUS_TRANSPORT_ERROR, {"causal = 0", "causal = 1", "rank 1"}));
    });
  for (std::thread& thread : threads) thread.join();
}

// A mistake that only C can make, on one rank, must not leave the other waiting.
TEST(CRanks, AMistakeOfOneRankReachesTheOther) {
  const auto transports = make_thread_group(2);
  std::vector<std::thread> threads;
  for (int i = 0; i < 2; ++i)
    threads.emplace_back([&, i] {
      Rank rank;
      const annulus_transport_callbacks functions = callbacks(*transports[static_cast<std::size_t>(i)]);
      ASSERT_TRUE(succeeds(annulus_transport_create(&functions, &rank.transport)));
      annulus_problem given = problem();
      if (i == 1) given.preset = 99;
      const annulus_sharding shards = sharding(2);
      EXPECT_TRUE(fails(annulus_rank_create(&given, &shards, rank.transport, nullptr, &rank.attention),
                        i == 1 ? ANNULUS_INVALID_ARGUMENT : ANNULUS_TRANSPORT_ERROR, {"preset", "99"}));
    });
  for (std::thread& thread : threads) thread.join();
}

TEST(CRanks, AMistakeInACallReachesTheOther) {
  const annulus_sharding shards = sharding(2);
  for (const bool forward : {true, false}) {
    const auto transports = make_thread_group(2);
    std::barrier created(2);  // or the mistake reaches a rank that is still in annulus_rank_create
    std::vector<std::thread> threads;
    for (int i = 0; i < 2; ++i)
      threads.emplace_back([&, i] {
        Rank rank;
        const annulus_transport_callbacks functions = callbacks(*transports[static_cast<std::size_t>(i)]);
        EXPECT_TRUE(succeeds(annulus_transport_create(&functions, &rank.transport)));
        const annulus_problem given = problem();
        EXPECT_TRUE(succeeds(annulus_rank_create(&given, &shards, rank.transport, nullptr, &rank.attention)));
        created.arrive_and_wait();
        ASSERT_NE(rank.attention, nullptr);
        Tensors own(static_cast<std::int64_t>(positions(shards, i).size()));
        const int code = i == 1 ? ANNULUS_INVALID_ARGUMENT : ANNULUS_TRANSPORT_ERROR;
        if (forward) {
          auto args = own.forward();
          if (i == 1) args.lse_count = 0;
          EXPECT_TRUE(fails(annulus_rank_forward(rank.attention, &args), code, {"lse"}));
        } else {
          auto args = own.backward();
          if (i == 1) args.struct_size = 1;
          EXPECT_TRUE(fails(annulus_rank_backward(rank.attention, &args), code, {"backward_args"}));
        }
      });
    for (std::thread& thread : threads) thread.join();
  }
}

TEST(CRanks, RefusesNullsAndHalves) {
  annulus_transport* transport = nullptr;
  EXPECT_TRUE(fails(annulus_transport_create(nullptr, &transport), ANNULUS_INVALID_ARGUMENT, {"transport_callbacks"}));
  annulus_transport_callbacks half = looking_ahead(0, 2);
  EXPECT_TRUE(fails(annulus_transport_create(&half, nullptr), ANNULUS_INVALID_ARGUMENT, {"transport"}));
  half.wait = wait;
  EXPECT_TRUE(fails(annulus_transport_create(&half, &transport), ANNULUS_INVALID_ARGUMENT, {"post, wait and abort"}));
  const annulus_transport_callbacks nobody = looking_ahead(2, 2);
  EXPECT_TRUE(fails(annulus_transport_create(&nobody, &transport), ANNULUS_INVALID_ARGUMENT, {"rank 2 of 2"}));
  EXPECT_EQ(transport, nullptr);

  const annulus_problem given = problem();
  annulus_sharding shards = sharding(2);
  annulus_rank_attention* attention = nullptr;
  EXPECT_TRUE(fails(annulus_rank_create(&given, &shards, nullptr, nullptr, &attention), ANNULUS_INVALID_ARGUMENT,
                    {"transport"}));
  EXPECT_TRUE(fails(annulus_rank_forward(nullptr, nullptr), ANNULUS_INVALID_ARGUMENT, {"attention"}));
  std::size_t count = 0;
  EXPECT_TRUE(
      fails(annulus_positions(&shards, kTokens, 2, nullptr, 0, &count), ANNULUS_INVALID_ARGUMENT, {"rank 2 of 2"}));
  EXPECT_TRUE(fails(annulus_positions(&shards, -1, 0, nullptr, 0, &count), ANNULUS_INVALID_ARGUMENT, {"-1"}));
  shards.layout = 9;
  EXPECT_TRUE(fails(annulus_positions(&shards, kTokens, 0, nullptr, 0, &count), ANNULUS_INVALID_ARGUMENT, {"layout"}));
  annulus_rank_destroy(nullptr);
  annulus_transport_destroy(nullptr);
}

TEST(CRanks, TheHeaderIsC) {
  int64_t received = 0;
  EXPECT_TRUE(succeeds(annulus_ranks_in_c(&received)));
  EXPECT_GT(received, 0);
}

TEST(CRanks, PositionsOfEveryLayout) {
  EXPECT_EQ(positions(sharding(3, ANNULUS_LAYOUT_STRIPED), 1).at(2), 7);
  const std::vector<std::int64_t> zigzag = positions(sharding(3, ANNULUS_LAYOUT_ZIGZAG), 0);
  EXPECT_EQ(zigzag.front(), 0);
  EXPECT_EQ(zigzag.back(), kTokens - 1);
  EXPECT_EQ(positions(sharding(3), 2).back(), kTokens - 1);
}

}  // namespace
}  // namespace annulus
