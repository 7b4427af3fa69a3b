/* The header of ranks is C too: a transport that looks ahead, and every question that can be asked without a peer. */
#include "annulus/annulus_ranks.h"

int annulus_ranks_in_c(int64_t* received_bytes);
int annulus_ranks_in_c(int64_t* received_bytes) {
  const annulus_branch branches[] = {{.segment = 16, .dilation = 2}};
  const annulus_problem problem = {.struct_size = sizeof problem,
                                   .batch = 1,
                                   .tokens = 32,
                                   .heads = 2,
                                   .head_dim = 4,
                                   .branches = branches,
                                   .branch_count = 1};
  const int64_t boundaries[] = {0, 8, 20, 32};
  const annulus_sharding sharding = {.struct_size = sizeof sharding,
                                     .ranks = 3,
                                     .layout = ANNULUS_LAYOUT_CONTIGUOUS,
                                     .boundaries = boundaries,
                                     .boundary_count = 4};
  const annulus_rank_options options = {.struct_size = sizeof options, .strategy = ANNULUS_STRATEGY_EXCHANGE};
  const annulus_transport_callbacks none = {.struct_size = sizeof none, .rank = 1, .size = 3};
  annulus_transport* transport = NULL;
  annulus_rank_attention* attention = NULL;
  int64_t sent = 0, rows = 0, query_rows = 0, positions[32];
  size_t bytes = 0, count = 0, length = 0;
  int status = annulus_transport_create(&none, &transport);
  if (status == ANNULUS_OK) status = annulus_rank_create(&problem, &sharding, transport, &options, &attention);
  if (status == ANNULUS_OK) status = annulus_rank_traffic(attention, ANNULUS_FORWARD, &sent, received_bytes);
  if (status == ANNULUS_OK) status = annulus_rank_rows(attention, &rows, &query_rows);
  if (status == ANNULUS_OK) status = annulus_rank_workspace_bytes(attention, ANNULUS_BACKWARD, &bytes);
  if (status == ANNULUS_OK) status = annulus_rank_memory(attention, ANNULUS_FORWARD, NULL, 0, &count);
  if (status == ANNULUS_OK) status = annulus_rank_explain(attention, NULL, 0, &length);
  if (status == ANNULUS_OK) status = annulus_positions(&sharding, 32, 1, positions, 32, &count);
  if (status == ANNULUS_OK && (rows != 12 || query_rows != 12 || count != 12 || positions[0] != 8 || length == 0))
    status = ANNULUS_INTERNAL;
  annulus_rank_destroy(attention);
  annulus_transport_destroy(transport);
  return status;
}
