// The C ABI gives the same bits as the C++ API, a code and a message for every mistake, and never a crash for a null
// pointer.
#include "annulus/annulus.h"

#include <cstring>
#include <new>
#include <random>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include <gtest/gtest.h>

#include "annulus/attention.h"
#include "api/c_status.h"
#include "numeric/half.h"

extern "C" int annulus_example_in_c(float* v, float* out, float* dv);

namespace annulus {
namespace {

using testing::AssertionFailure;
using testing::AssertionResult;
using testing::AssertionSuccess;

AssertionResult succeeds(int status) {
  if (status == ANNULUS_OK) return AssertionSuccess();
  return AssertionFailure() << "status " << status << ": " << annulus_last_error();
}

// The status, and all of `parts` somewhere in the message.
AssertionResult fails(int status, int expected, const std::vector<std::string>& parts) {
  const std::string message = annulus_last_error();
  if (status != expected)
    return AssertionFailure() << "status " << status << " instead of " << expected << ": " << message;
  for (const std::string& part : parts)
    if (message.find(part) == std::string::npos) return AssertionFailure() << "no '" << part << "' in: " << message;
  return AssertionSuccess();
}

// A handle that lets go of itself.
struct Handle {
  annulus_attention* get = nullptr;
  Handle() = default;
  Handle(const Handle&) = delete;
  Handle& operator=(const Handle&) = delete;
  ~Handle() { annulus_destroy(get); }
};

// Two branches, four heads on two, 37 tokens: the C structs, with arrays that stay where they are.
struct CProblem {
  std::vector<std::vector<std::int64_t>> classes;
  std::vector<annulus_branch> branches;
  std::vector<std::int64_t> documents;
  double scale = 0.5;
  double output_scale = 2;
  annulus_problem problem{};

  CProblem() {
    branches = {{.segment = 8, .dilation = 1, .first_head = 0, .head_count = 0, .classes = nullptr, .class_count = 0},
                {.segment = 20, .dilation = 3, .first_head = 0, .head_count = 0, .classes = nullptr, .class_count = 0}};
    problem.struct_size = sizeof problem;
    problem.batch = 2;
    problem.tokens = 37;
    problem.heads = 4;
    problem.kv_heads = 2;
    problem.head_dim = 8;
    problem.branches = branches.data();
    problem.branch_count = 2;
  }
  CProblem(const CProblem&) = delete;
  CProblem& operator=(const CProblem&) = delete;

  int create(Handle& handle, const annulus_options* options = nullptr) const {
    return annulus_create(&problem, options, &handle.get);
  }
};

// Random tensors of one problem, as raw storage that both interfaces view.
class Tensors {
 public:
  explicit Tensors(const Problem& problem) : problem_(problem) {
    std::mt19937 random(1);
    for (auto* tensor : {&q, &dout}) *tensor = draw(problem.heads, random);
    for (auto* tensor : {&k, &v}) *tensor = draw(problem.kv_heads, random);
    out = dq = std::vector<std::byte>(q.size());
    dk = dv = std::vector<std::byte>(k.size());
    lse.resize(static_cast<std::size_t>(problem.batch * problem.heads * problem.tokens));
  }

  annulus_tensor c_view(std::vector<std::byte>& data) const {
    annulus_tensor tensor{};
    tensor.data = data.data();
    tensor.dtype = static_cast<int>(problem_.dtype);
    const auto shape = shape_of(data);
    std::copy(shape.begin(), shape.end(), tensor.shape);
    return tensor;
  }

  TensorView view(std::vector<std::byte>& data) const { return {data.data(), problem_.dtype, shape_of(data)}; }

  annulus_forward_args c_forward() {
    annulus_forward_args args{};
    args.struct_size = sizeof args;
    args.q = c_view(q), args.k = c_view(k), args.v = c_view(v), args.out = c_view(out);
    args.lse = lse.data();
    args.lse_count = lse.size();
    return args;
  }

  annulus_backward_args c_backward() {
    annulus_backward_args args{};
    args.struct_size = sizeof args;
    args.q = c_view(q), args.k = c_view(k), args.v = c_view(v), args.out = c_view(out), args.dout = c_view(dout);
    args.dq = c_view(dq), args.dk = c_view(dk), args.dv = c_view(dv);
    args.lse = lse.data();
    args.lse_count = lse.size();
    return args;
  }

  void attend(const Attention& attention) {
    attention.forward({.q = view(q), .k = view(k), .v = view(v), .out = view(out), .lse = lse, .workspace = {}});
    attention.backward({.q = view(q),
                        .k = view(k),
                        .v = view(v),
                        .out = view(out),
                        .lse = lse,
                        .dout = view(dout),
                        .dq = view(dq),
                        .dk = view(dk),
                        .dv = view(dv),
                        .workspace = {}});
  }

  std::vector<std::byte> q, k, v, out, dout, dq, dk, dv;
  std::vector<float> lse;

 private:
  std::array<std::int64_t, 4> shape_of(const std::vector<std::byte>& data) const {
    return {problem_.batch, problem_.tokens, data.size() == q.size() ? problem_.heads : problem_.kv_heads,
            problem_.head_dim};
  }

  std::vector<std::byte> draw(std::int64_t heads, std::mt19937& random) const {
    std::normal_distribution<float> normal;
    const auto size = static_cast<std::size_t>(size_of(problem_.dtype));
    std::vector<std::byte> bytes(
        static_cast<std::size_t>(problem_.batch * problem_.tokens * heads * problem_.head_dim) * size);
    for (std::size_t i = 0; i < bytes.size(); i += size) {
      const float value = normal(random);
      const auto bits = encode(value, format_of(problem_.dtype == DType::fp32 ? DType::fp16 : problem_.dtype));
      std::memcpy(&bytes[i], problem_.dtype == DType::fp32 ? static_cast<const void*>(&value) : &bits, size);
    }
    return bytes;
  }

  Problem problem_;
};

// Runs both interfaces on the same inputs and compares all results bit by bit.
void expect_same_bits(const CProblem& c, const Problem& problem) {
  const Attention attention(problem);
  Tensors expected(attention.problem());
  expected.attend(attention);

  Handle handle;
  ASSERT_TRUE(succeeds(c.create(handle)));
  Tensors got(attention.problem());
  const annulus_forward_args forward = got.c_forward();
  ASSERT_TRUE(succeeds(annulus_forward(handle.get, &forward)));
  const annulus_backward_args backward = got.c_backward();
  ASSERT_TRUE(succeeds(annulus_backward(handle.get, &backward)));
  for (auto tensor : {&Tensors::out, &Tensors::dq, &Tensors::dk, &Tensors::dv})
    EXPECT_EQ(got.*tensor, expected.*tensor);
  EXPECT_EQ(std::memcmp(got.lse.data(), expected.lse.data(), got.lse.size() * sizeof(float)), 0);
}

Problem same_problem(Preset preset) {
  Problem problem;
  problem.batch = 2;
  problem.tokens = 37;
  problem.heads = 4;
  problem.kv_heads = 2;
  problem.head_dim = 8;
  problem.pattern = make_pattern(preset, {8, 20}, {1, 3}, 4);
  return problem;
}

TEST(CAbi, PresetsGiveTheSameBits) {
  for (const Preset preset : {Preset::longnet, Preset::torchscale, Preset::residue, Preset::head_groups}) {
    CProblem c;
    c.problem.preset = static_cast<int>(preset);
    expect_same_bits(c, same_problem(preset));
  }
}

TEST(CAbi, EveryFieldArrives) {
  CProblem c;
  c.classes = {{0, 0, 0, 0}, {2, 1}};
  c.branches[0].classes = c.classes[0].data();
  c.branches[0].class_count = 4;
  c.branches[1].first_head = 1;
  c.branches[1].head_count = 2;
  c.branches[1].classes = c.classes[1].data();
  c.branches[1].class_count = 2;
  c.documents = {0, 5, 5, 37};
  c.problem.documents = c.documents.data();
  c.problem.document_bounds = 4;
  c.problem.scale = &c.scale;
  c.problem.output_scale = &c.output_scale;
  c.problem.dtype = ANNULUS_BF16;
  c.problem.phase = ANNULUS_PHASE_TABLE;
  c.problem.gradient = ANNULUS_GRADIENT_DETACHED;
  c.problem.causal = 1;

  Problem problem = same_problem(Preset::longnet);
  problem.pattern.phase = Phase::table;
  problem.pattern.gradient = Gradient::detached;
  problem.pattern.output_scale = 2;
  problem.pattern.branches[0].classes = {0, 0, 0, 0};
  problem.pattern.branches[1].first_head = 1;
  problem.pattern.branches[1].head_count = 2;
  problem.pattern.branches[1].classes = {2, 1};
  problem.documents = {0, 5, 5, 37};
  problem.scale = 0.5;
  problem.dtype = DType::bf16;
  problem.causal = true;
  expect_same_bits(c, problem);
}

TEST(CAbi, PaddingAndPhasesArrive) {
  for (const int phase : {ANNULUS_PHASE_BY_HEAD, ANNULUS_PHASE_BY_HEAD_BLOCK, ANNULUS_PHASE_EVERY}) {
    CProblem c;
    c.problem.phase = phase;
    c.problem.dtype = ANNULUS_FP16;
    c.problem.gradient = ANNULUS_GRADIENT_EXACT;
    c.problem.pad_like_torchscale = 1;
    Problem problem = same_problem(Preset::longnet);
    problem.pattern.phase = static_cast<Phase>(phase - 1);
    problem.dtype = DType::fp16;
    problem.pattern.pad_like_torchscale = true;
    expect_same_bits(c, problem);
  }
}

TEST(CAbi, StridesArrive) {
  CProblem c;
  Handle handle;
  ASSERT_TRUE(succeeds(c.create(handle)));
  Tensors dense(resolve(same_problem(Preset::longnet)));
  annulus_forward_args args = dense.c_forward();
  ASSERT_TRUE(succeeds(annulus_forward(handle.get, &args)));

  // The output with heads and tokens exchanged: [batch, heads, tokens, head_dim] in memory.
  Tensors swapped(resolve(same_problem(Preset::longnet)));
  args = swapped.c_forward();
  const std::int64_t strides[4] = {37 * 4 * 8, 8, 37 * 8, 1};
  std::copy_n(strides, 4, args.out.stride);
  ASSERT_TRUE(succeeds(annulus_forward(handle.get, &args)));
  for (std::size_t b = 0; b < 2; ++b)
    for (std::size_t t = 0; t < 37; ++t)
      for (std::size_t j = 0; j < 4; ++j)
        EXPECT_EQ(std::memcmp(&dense.out[((b * 37 + t) * 4 + j) * 32], &swapped.out[((b * 4 + j) * 37 + t) * 32], 32),
                  0);
}

TEST(CAbi, OptionsAndWorkspaceArrive) {
  CProblem c;
  Handle handle;
  annulus_options options{};
  options.struct_size = sizeof options;
  options.threads = 1;
  const std::string best = instruction_sets().back();
  options.instruction_set = best.c_str();
  ASSERT_TRUE(succeeds(c.create(handle, &options)));
  const Attention same(same_problem(Preset::longnet), {.threads = 1, .instruction_set = best});

  for (const int pass : {ANNULUS_FORWARD, ANNULUS_BACKWARD}) {
    std::size_t bytes = 0;
    ASSERT_TRUE(succeeds(annulus_workspace_bytes(handle.get, pass, &bytes)));
    EXPECT_EQ(bytes, same.workspace_bytes(static_cast<Pass>(pass)));
  }
  Tensors tensors(same.problem());
  annulus_forward_args args = tensors.c_forward();
  const std::size_t bytes = same.workspace_bytes(Pass::forward);
  void* workspace = ::operator new (bytes, std::align_val_t{64});
  args.workspace = workspace;
  args.workspace_bytes = bytes;
  EXPECT_TRUE(succeeds(annulus_forward(handle.get, &args)));
  args.workspace_bytes = bytes - 1;
  EXPECT_TRUE(
      fails(annulus_forward(handle.get, &args), ANNULUS_INVALID_ARGUMENT, {"workspace", std::to_string(bytes - 1)}));
  args.workspace_bytes = 0;
  EXPECT_TRUE(fails(annulus_forward(handle.get, &args), ANNULUS_INVALID_ARGUMENT, {"workspace", "a pointer and 0"}));
  ::operator delete (workspace, std::align_val_t{64});
}

TEST(CAbi, EmptyProblemsNeedNoData) {
  for (const bool no_tokens : {false, true}) {
    CProblem c;
    (no_tokens ? c.problem.tokens : c.problem.batch) = 0;
    Handle handle;
    ASSERT_TRUE(succeeds(c.create(handle)));
    annulus_forward_args args{};
    args.struct_size = sizeof args;
    for (annulus_tensor* tensor : {&args.q, &args.k, &args.v, &args.out}) {
      const std::int64_t heads = tensor == &args.q || tensor == &args.out ? 4 : 2;
      const std::int64_t shape[4] = {c.problem.batch, c.problem.tokens, heads, 8};
      std::copy_n(shape, 4, tensor->shape);
    }
    EXPECT_TRUE(succeeds(annulus_forward(handle.get, &args)));
  }
}

TEST(CAbi, ExplainIsLikeSnprintf) {
  CProblem c;
  Handle handle;
  ASSERT_TRUE(succeeds(c.create(handle)));
  const std::string whole = Attention(same_problem(Preset::longnet)).explain();
  std::size_t length = 0;
  ASSERT_TRUE(succeeds(annulus_explain(handle.get, nullptr, 0, &length)));
  EXPECT_EQ(length, whole.size());
  for (const std::size_t capacity :
       {std::size_t{1}, std::size_t{10}, whole.size(), whole.size() + 1, whole.size() + 9}) {
    std::vector<char> buffer(capacity + 1, '#');
    length = 0;
    ASSERT_TRUE(succeeds(annulus_explain(handle.get, buffer.data(), capacity, &length)));
    EXPECT_EQ(length, whole.size());
    EXPECT_EQ(std::string(buffer.data()), whole.substr(0, capacity - 1));
    EXPECT_EQ(buffer[capacity], '#');
  }
  EXPECT_TRUE(succeeds(annulus_explain(handle.get, nullptr, 0, nullptr)));
  EXPECT_TRUE(fails(annulus_explain(handle.get, nullptr, 5, &length), ANNULUS_INVALID_ARGUMENT, {"buffer", "null"}));
}

TEST(CAbi, MemoryListsEveryComponent) {
  CProblem c;
  Handle handle;
  ASSERT_TRUE(succeeds(c.create(handle)));
  const Attention same(same_problem(Preset::longnet));
  for (const int pass : {ANNULUS_FORWARD, ANNULUS_BACKWARD}) {
    const std::vector<MemoryComponent> expected = same.memory(static_cast<Pass>(pass));
    std::size_t count = 0;
    ASSERT_TRUE(succeeds(annulus_memory(handle.get, pass, nullptr, 0, &count)));
    ASSERT_EQ(count, expected.size());
    std::vector<annulus_memory_component> got(count);
    got.back().bytes = -7;
    ASSERT_TRUE(succeeds(annulus_memory(handle.get, pass, got.data(), count - 1, &count)));
    EXPECT_EQ(got.back().bytes, -7);
    ASSERT_TRUE(succeeds(annulus_memory(handle.get, pass, got.data(), count, &count)));
    for (std::size_t i = 0; i < count; ++i) {
      EXPECT_EQ(got[i].name, expected[i].name);
      EXPECT_EQ(got[i].bytes, expected[i].bytes);
    }
  }
  std::size_t count = 0;
  EXPECT_TRUE(fails(annulus_memory(handle.get, 2, nullptr, 0, &count), ANNULUS_INVALID_ARGUMENT, {"pass", "got 2"}));
  EXPECT_TRUE(fails(annulus_memory(handle.get, 0, nullptr, 3, &count), ANNULUS_INVALID_ARGUMENT, {"components"}));
  EXPECT_TRUE(fails(annulus_memory(handle.get, 0, nullptr, 0, nullptr), ANNULUS_INVALID_ARGUMENT, {"count"}));
}

TEST(CAbi, NullPointersAreErrors) {
  CProblem c;
  Handle handle;
  ASSERT_TRUE(succeeds(c.create(handle)));
  Tensors tensors(resolve(same_problem(Preset::longnet)));
  const annulus_forward_args forward = tensors.c_forward();
  const annulus_backward_args backward = tensors.c_backward();
  std::size_t size = 0;
  Handle other;
  const int invalid = ANNULUS_INVALID_ARGUMENT;
  EXPECT_TRUE(fails(annulus_create(nullptr, nullptr, &other.get), invalid, {"problem", "null"}));
  EXPECT_TRUE(fails(annulus_create(&c.problem, nullptr, nullptr), invalid, {"attention", "null"}));
  EXPECT_TRUE(fails(annulus_forward(nullptr, &forward), invalid, {"attention", "annulus_create"}));
  EXPECT_TRUE(fails(annulus_forward(handle.get, nullptr), invalid, {"forward_args", "null"}));
  EXPECT_TRUE(fails(annulus_backward(nullptr, &backward), invalid, {"attention"}));
  EXPECT_TRUE(fails(annulus_backward(handle.get, nullptr), invalid, {"backward_args"}));
  EXPECT_TRUE(fails(annulus_workspace_bytes(nullptr, 0, &size), invalid, {"attention"}));
  EXPECT_TRUE(fails(annulus_workspace_bytes(handle.get, 0, nullptr), invalid, {"bytes"}));
  EXPECT_TRUE(fails(annulus_explain(nullptr, nullptr, 0, &size), invalid, {"attention"}));
  EXPECT_TRUE(fails(annulus_memory(nullptr, 0, nullptr, 0, &size), invalid, {"attention"}));
  annulus_destroy(nullptr);
}

TEST(CAbi, NullTensorsAreErrors) {
  CProblem c;
  Handle handle;
  ASSERT_TRUE(succeeds(c.create(handle)));
  Tensors tensors(resolve(same_problem(Preset::longnet)));
  for (const auto& [member, name] : {std::pair{&annulus_forward_args::q, "q"},
                                     {&annulus_forward_args::k, "k"},
                                     {&annulus_forward_args::v, "v"},
                                     {&annulus_forward_args::out, "out"}}) {
    annulus_forward_args args = tensors.c_forward();
    (args.*member).data = nullptr;
    EXPECT_TRUE(fails(annulus_forward(handle.get, &args), ANNULUS_INVALID_ARGUMENT, {name, "null"}));
  }
  for (const auto& [member, name] : {std::pair{&annulus_backward_args::q, "q"},
                                     {&annulus_backward_args::k, "k"},
                                     {&annulus_backward_args::v, "v"},
                                     {&annulus_backward_args::out, "out"},
                                     {&annulus_backward_args::dout, "dout"},
                                     {&annulus_backward_args::dq, "dq"},
                                     {&annulus_backward_args::dk, "dk"},
                                     {&annulus_backward_args::dv, "dv"}}) {
    annulus_backward_args args = tensors.c_backward();
    (args.*member).data = nullptr;
    EXPECT_TRUE(fails(annulus_backward(handle.get, &args), ANNULUS_INVALID_ARGUMENT, {name, "null"}));
  }
  annulus_backward_args backward = tensors.c_backward();
  backward.lse = nullptr;
  backward.lse_count = 0;
  EXPECT_TRUE(fails(annulus_backward(handle.get, &backward), ANNULUS_INVALID_ARGUMENT, {"lse"}));
  annulus_forward_args forward = tensors.c_forward();
  forward.lse = nullptr;
  EXPECT_TRUE(fails(annulus_forward(handle.get, &forward), ANNULUS_INVALID_ARGUMENT, {"lse", "null and 296"}));
  forward.lse_count = 0;
  EXPECT_TRUE(succeeds(annulus_forward(handle.get, &forward)));
}

TEST(CAbi, AFailureWritesNothing) {
  CProblem c;
  Handle handle;
  ASSERT_TRUE(succeeds(c.create(handle)));
  Tensors tensors(resolve(same_problem(Preset::longnet)));
  const std::vector<std::byte> untouched(tensors.out.size(), std::byte{0x5a});
  tensors.out = untouched;
  annulus_forward_args args = tensors.c_forward();
  args.lse_count -= 1;
  EXPECT_TRUE(fails(annulus_forward(handle.get, &args), ANNULUS_INVALID_ARGUMENT, {"lse", "296", "295"}));
  EXPECT_EQ(tensors.out, untouched);
}

// The message of annulus_create for a problem that `spoil` has changed. The handle must come back null.
template <class Spoil>
AssertionResult refuses(Spoil spoil, const std::vector<std::string>& parts, int status = ANNULUS_INVALID_ARGUMENT) {
  CProblem c;
  spoil(c);
  Handle none;
  int not_a_handle = 0;
  none.get = reinterpret_cast<annulus_attention*>(&not_a_handle);
  const int got = c.create(none);
  const bool cleared = none.get == nullptr;
  if (got != ANNULUS_OK) none.get = nullptr;
  if (!cleared && got != ANNULUS_OK) return AssertionFailure() << "the handle was not set to null";
  return fails(got, status, parts);
}

TEST(CAbi, BadProblemsAreRefused) {
  EXPECT_TRUE(refuses([](CProblem& c) { c.problem.tokens = -1; }, {"tokens", "-1"}));
  EXPECT_TRUE(refuses([](CProblem& c) { c.problem.kv_heads = 3; }, {"kv_heads", "3"}));
  EXPECT_TRUE(refuses([](CProblem& c) { c.branches[1].segment = 0; }, {"segment", "branch 1"}));
  EXPECT_TRUE(refuses([](CProblem& c) { c.branches[0].dilation = -2; }, {"dilation", "-2"}));
  EXPECT_TRUE(refuses([](CProblem& c) { c.branches[0].head_count = -1; }, {"head_count", "-1"}));
  EXPECT_TRUE(refuses([](CProblem& c) { c.branches[0].head_count = 5; }, {"heads", "branch 0", "5"}));
  EXPECT_TRUE(refuses([](CProblem& c) { c.problem.branch_count = 0; }, {"branch"}));
  EXPECT_TRUE(refuses([](CProblem& c) { c.problem.branch_count = -1; }, {"branches", "-1"}));
  EXPECT_TRUE(refuses([](CProblem& c) { c.problem.branches = nullptr; }, {"branches", "null and 2"}));
  EXPECT_TRUE(refuses([](CProblem& c) { c.branches[0].class_count = 2; }, {"classes", "null and 2"}));
  EXPECT_TRUE(refuses([](CProblem& c) { c.problem.document_bounds = 2; }, {"documents", "null and 2"}));
  EXPECT_TRUE(refuses([](CProblem& c) { c.problem.dtype = 3; }, {"dtype", "got 3", "annulus_dtype"}));
  EXPECT_TRUE(refuses([](CProblem& c) { c.problem.dtype = -1; }, {"dtype", "got -1"}));
  EXPECT_TRUE(refuses([](CProblem& c) { c.problem.preset = 4; }, {"preset", "got 4"}));
  EXPECT_TRUE(refuses([](CProblem& c) { c.problem.phase = 5; }, {"phase", "got 5"}));
  EXPECT_TRUE(refuses([](CProblem& c) { c.problem.gradient = 3; }, {"gradient", "got 3"}));
  EXPECT_TRUE(refuses([](CProblem& c) { c.problem.phase = ANNULUS_PHASE_TABLE; }, {"class"}));
  const auto head_groups = [](CProblem& c) { c.problem.preset = ANNULUS_PRESET_HEAD_GROUPS; };
  EXPECT_TRUE(refuses([&](CProblem& c) { head_groups(c), c.problem.phase = 1; }, {"head_groups", "phase"}));
  EXPECT_TRUE(refuses([&](CProblem& c) { head_groups(c), c.branches[0].head_count = 1; }, {"head_groups"}));
}

TEST(CAbi, DocumentsMustFit) {
  const std::int64_t bounds[] = {0, 9, 36};
  const auto spoil = [&](CProblem& c) {
    c.problem.documents = bounds;
    c.problem.document_bounds = 3;
  };
  EXPECT_TRUE(refuses(spoil, {"cu_seqlens", "37", "36"}));
}

TEST(CAbi, StructSizesAreChecked) {
  EXPECT_TRUE(refuses([](CProblem& c) { c.problem.struct_size = 0; }, {"struct_size", "annulus_problem", "got 0"}));
  EXPECT_TRUE(refuses([](CProblem& c) { c.problem.struct_size -= 1; },
                      {"struct_size", std::to_string(sizeof(annulus_problem))}));
  EXPECT_TRUE(refuses([](CProblem& c) { c.problem.struct_size = std::size_t{1} << 40; }, {"struct_size"}));

  CProblem c;
  Handle handle;
  annulus_options options{};
  EXPECT_TRUE(fails(c.create(handle, &options), ANNULUS_INVALID_ARGUMENT, {"struct_size", "annulus_options"}));
  ASSERT_TRUE(succeeds(c.create(handle)));
  Tensors tensors(resolve(same_problem(Preset::longnet)));
  annulus_forward_args forward = tensors.c_forward();
  forward.struct_size = 8;
  EXPECT_TRUE(
      fails(annulus_forward(handle.get, &forward), ANNULUS_INVALID_ARGUMENT, {"struct_size", "annulus_forward_args"}));
  annulus_backward_args backward = tensors.c_backward();
  backward.struct_size = 8;
  EXPECT_TRUE(fails(annulus_backward(handle.get, &backward), ANNULUS_INVALID_ARGUMENT,
                    {"struct_size", "annulus_backward_args"}));
}

TEST(CAbi, LaterVersionsOfAStructAreReadAsFarAsTheyAreKnown) {
  struct Later {
    annulus_problem problem;
    std::int64_t more;
  };
  CProblem c;
  Later later{c.problem, 0};
  later.problem.struct_size = sizeof later;
  Handle handle;
  EXPECT_TRUE(succeeds(annulus_create(&later.problem, nullptr, &handle.get)));
  later.more = 1;
  Handle none;
  EXPECT_TRUE(
      fails(annulus_create(&later.problem, nullptr, &none.get), ANNULUS_UNSUPPORTED, {"annulus_problem", "newer"}));
  EXPECT_EQ(none.get, nullptr);
}

TEST(CAbi, UnknownInstructionSetsAreRefused) {
  CProblem c;
  annulus_options options{};
  options.struct_size = sizeof options;
  options.instruction_set = "mmx";
  Handle handle;
  const int status = c.create(handle, &options);
  EXPECT_NE(status, ANNULUS_OK);
  EXPECT_NE(status, ANNULUS_INTERNAL);
  EXPECT_NE(std::string(annulus_last_error()).find("mmx"), std::string::npos);
}

template <class Exception>
int status_of(const Exception& exception) {
  return as_status([&] { throw exception; });
}

TEST(CAbi, EveryExceptionHasItsCode) {
  EXPECT_TRUE(fails(status_of(InvalidArgument("a1")), ANNULUS_INVALID_ARGUMENT, {"a1"}));
  EXPECT_TRUE(fails(status_of(Unsupported("a2")), ANNULUS_UNSUPPORTED, {"a2"}));
  EXPECT_TRUE(fails(status_of(OutOfMemory("a3")), ANNULUS_OUT_OF_MEMORY, {"a3"}));
  EXPECT_TRUE(fails(status_of(DeviceError("a4")), ANNULUS_DEVICE_ERROR, {"a4"}));
  EXPECT_TRUE(fails(status_of(TransportError("a5")), ANNULUS_TRANSPORT_ERROR, {"a5"}));
  EXPECT_TRUE(fails(status_of(std::bad_alloc()), ANNULUS_OUT_OF_MEMORY, {"memory"}));
  EXPECT_TRUE(fails(status_of(std::logic_error("a6")), ANNULUS_INTERNAL, {"a6"}));
  EXPECT_TRUE(fails(status_of(7), ANNULUS_INTERNAL, {"unknown"}));
  const std::string endless(5000, 'x');
  EXPECT_TRUE(fails(status_of(Unsupported(endless)), ANNULUS_UNSUPPORTED, {endless.substr(0, 1000)}));
}

TEST(CAbi, MessagesBelongToTheirThread) {
  EXPECT_NE(annulus_create(nullptr, nullptr, nullptr), ANNULUS_OK);
  const std::string mine = annulus_last_error();
  EXPECT_NE(mine, "");
  std::thread([] {
    EXPECT_STREQ(annulus_last_error(), "");
    EXPECT_NE(annulus_forward(nullptr, nullptr), ANNULUS_OK);
  }).join();
  EXPECT_EQ(annulus_last_error(), mine);
}

TEST(CAbi, TheVersionIsTheLibrarys) { EXPECT_EQ(annulus_version(), version()); }

TEST(CAbi, AProgramInC) {
  std::vector<float> v(4 * 2 * 3), out(v.size()), dv(v.size());
  for (std::size_t i = 0; i < v.size(); ++i) v[i] = static_cast<float>(i);
  ASSERT_TRUE(succeeds(annulus_example_in_c(v.data(), out.data(), dv.data())));
  for (std::size_t i = 0; i < v.size(); ++i) {
    const std::size_t first = i / 12 * 12 + i % 6;  // of the two tokens of this segment
    EXPECT_NEAR(out[i], (v[first] + v[first + 6]) / 2, 1e-5f);
    EXPECT_NEAR(dv[i], 1, 1e-5f);
  }
}

}  // namespace
}  // namespace annulus
