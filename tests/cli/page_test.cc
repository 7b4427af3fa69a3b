// Pages are drawn from objects that anybody may have written: whatever is missing is left out, and no text of theirs
// becomes markup.
#include "cli/page.h"

#include <gtest/gtest.h>

namespace annulus::cli {
namespace {

Json environment() { return {{"version", "0.1.0"}, {"cpu", "<b>fast</b> & \"odd\""}, {"ranks", 2}, {"threads", 1}}; }

Json bench_of(int ranks, double ms) {
  Json object = {{"problem", {{"tokens", 64}, {"heads", 2}}},
                 {"environment", environment()},
                 {"forward", {{"ms", {{"median", ms}, {"best", ms}, {"worst", ms}}}, {"peak_fraction", 0.5}}},
                 {"traffic", {{"sent_bytes", 1024}, {"ring_bytes", 4096}}},
                 {"memory", {{"peak_bytes", 2048}, {"plan_bytes", 2048}, {"components", {{"tiles", 512}}}}}};
  object["environment"]["ranks"] = ranks;
  return object;
}

std::string page_of(const Json& object) { return draw_page("Page", {{"x.json", object}}); }

bool has(const std::string& page, const std::string& part) { return page.find(part) != std::string::npos; }

TEST(Page, KnowsWhoWroteAnObject) {
  EXPECT_EQ(command_of({{"environment", {}}, {"checks", Json::array()}}), "verify");
  EXPECT_EQ(command_of({{"environment", {}}, {"fits", true}}), "plan");
  EXPECT_EQ(command_of({{"environment", {}}, {"checksum", {}}}), "run");
  EXPECT_EQ(command_of({{"environment", {}}, {"instruction_sets", {}}}), "info");
  EXPECT_EQ(command_of({{"environment", {}}, {"forward", {}}}), "bench");
  for (const char* text : {"{}", "[]", "3", "null", R"({"checks": []})", R"({"environment": {}})"})
    EXPECT_EQ(command_of(Json::parse(text)), "") << text;
  EXPECT_EQ(command_of(Json::parse("{", nullptr, false)), "");
}

TEST(Page, TextNeverBecomesMarkup) {
  const std::string page = draw_page("<script>", {{"<i>.json", bench_of(2, 3)}});
  EXPECT_FALSE(has(page, "<script>"));
  EXPECT_FALSE(has(page, "<i>"));
  EXPECT_FALSE(has(page, "<b>fast"));
  EXPECT_TRUE(has(page, "&lt;b&gt;fast&lt;/b&gt; &amp; &quot;odd&quot;"));
}

TEST(Page, SaysHowFastHowMuchAndHowFar) {
  const std::string page = page_of(bench_of(2, 3));
  for (const char* part : {"3.00 ms", "width:50.00%", "2.0 KiB", "tiles", "a ring of whole shards", "width:25.00%"})
    EXPECT_TRUE(has(page, part)) << part;
  EXPECT_FALSE(has(page, "Side by side"));
}

TEST(Page, MeasurementsOfOneProblemStandSideBySide) {
  const std::string page = draw_page("Page", {{"a", bench_of(1, 8)}, {"b", bench_of(4, 2)}});
  EXPECT_TRUE(has(page, "Side by side"));
  EXPECT_TRUE(has(page, "a, 1 rank<"));
  EXPECT_TRUE(has(page, "b, 4 ranks<"));
}

TEST(Page, AFailedCheckIsRed) {
  Json object = {{"environment", environment()}, {"passed", false}, {"checks", Json::array()}};
  const auto add = [&](const char* tensor, Json error, double bound, bool passed) {
    object["checks"].push_back(
        {{"what", "here"}, {"tensor", tensor}, {"max_error", error}, {"bound", bound}, {"passed", passed}});
  };
  add("out", 0.25, 1, true);
  add("dq", nullptr, 1, false);  // infinite
  add("lse", 0, 0, true);
  add("dv", 7, 0, false);
  const std::string page = page_of(object);
  for (const char* part : {"wrong\">failed", "4 checks", "width:25.00%", "infinite of 1",
                           "class=\"wrong\" style=\"width:100", "lse the same", "dv in 7 elements differ"})
    EXPECT_TRUE(has(page, part)) << part;
}

TEST(Page, DrawsThePatternOnceAndOnlyIfItIsOne) {
  Json problem = Json::parse(R"({"tokens": 8, "heads": 2, "kv_heads": 2, "causal": true, "phase": "by_head",
      "cu_seqlens": [0, 8], "branches": [{"segment": 4, "dilation": 2, "first_head": 0, "head_count": 2}]})");
  Json object = {{"problem", problem}, {"environment", environment()}, {"fits", true}};
  const std::string page = draw_page("Page", {{"a", object}, {"b", object}});
  EXPECT_TRUE(has(page, "head 0, positions 0 to 7"));
  EXPECT_TRUE(has(page, "head 1, positions 0 to 7"));
  EXPECT_EQ(page.find("head 1, positions", page.rfind("<h2>")), std::string::npos);
  for (const char* key : {"tokens", "branches", "phase", "cu_seqlens"}) {
    Json without = object;
    without["problem"][key] = "odd";
    EXPECT_FALSE(has(page_of(without), "<svg")) << key;
  }
}

TEST(Page, WhateverIsMissingIsLeftOut) {
  const Json whole = bench_of(2, 3);
  for (const auto& [key, value] : whole.items())
    for (const Json& other : {Json(nullptr), Json(7), Json("text"), Json::array({1, "x"}), Json::object()}) {
      Json odd = whole;
      odd[key] = other;
      EXPECT_TRUE(command_of(odd).empty() || has(page_of(odd), "</html>"));
    }
}

}  // namespace
}  // namespace annulus::cli
