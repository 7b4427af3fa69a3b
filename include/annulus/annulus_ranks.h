// Annulus for C on several ranks: one sequence over p processes, each with its own rows (docs/semantics.md, section 6).
// The meaning of all calls: annulus/ranks.h; the rules for structs and errors: annulus/annulus.h.
//
//   annulus_sharding sharding = {.struct_size = sizeof sharding, .ranks = 4};
//   annulus_transport* transport;                       // moves bytes by functions of yours
//   annulus_transport_create(&callbacks, &transport);
//   annulus_rank_attention* attention;
//   annulus_rank_create(&problem, &sharding, transport, NULL, &attention);   // all ranks together
//   annulus_rank_forward(attention, &args);                                  // all [batch, rows, heads, head_dim]
#ifndef ANNULUS_ANNULUS_RANKS_H_
#define ANNULUS_ANNULUS_RANKS_H_

// NOLINTBEGIN: names and headers of C

#include "annulus/annulus.h"

#ifdef __cplusplus
extern "C" {
#endif

enum annulus_layout { ANNULUS_LAYOUT_CONTIGUOUS = 0, ANNULUS_LAYOUT_ZIGZAG = 1, ANNULUS_LAYOUT_STRIPED = 2 };

enum annulus_strategy {
  ANNULUS_STRATEGY_AUTO = 0,
  ANNULUS_STRATEGY_EXCHANGE = 1,
  ANNULUS_STRATEGY_RESHARD = 2,
  ANNULUS_STRATEGY_RING = 3,
  ANNULUS_STRATEGY_GATHER = 4,
  ANNULUS_STRATEGY_REPLICATED = 5
};

// How memory of GPUs gets from rank to rank; that of the host always goes by the callbacks.
enum annulus_payload {
  ANNULUS_PAYLOAD_AUTO = 0,    // NCCL where all ranks have it and no two share a GPU, else staged: they decide together
  ANNULUS_PAYLOAD_STAGED = 1,  // through pinned memory, in pieces, by the callbacks
  ANNULUS_PAYLOAD_NCCL = 2     // by a communicator of its own; the callbacks bring its ranks together and watch them
};

typedef struct annulus_sharding {
  size_t struct_size;         // sizeof(annulus_sharding)
  int32_t ranks;              // p >= 1
  int32_t layout;             // annulus_layout
  const int64_t* boundaries;  // [boundary_count]: 0, end of rank 0, ..., tokens; contiguous alone; null: even shards
  int64_t boundary_count;     // ranks + 1, or 0 with null
} annulus_sharding;

typedef struct annulus_rank_options {
  size_t struct_size;             // sizeof(annulus_rank_options)
  const annulus_options* device;  // may be null; a GPU is this rank's own choice, that it is one all ranks'
  int32_t strategy;               // annulus_strategy
  int32_t reproducible;           // 1: the same bits for every number of ranks
  int64_t slot_bytes;             // what arrives at once is cut to about this; 0: 32 MiB
  int64_t timeout_ms;             // NCCL that moves nothing for this long is an error; 0: a minute
  int32_t payload;                // annulus_payload, on GPUs
  int32_t reserved;               // 0
} annulus_rank_options;

// One message, packed. Never to this rank itself, never empty.
typedef struct annulus_message {
  int32_t peer;
  int32_t reserved;  // 0
  void* data;        // [bytes]; what is sent is only read
  int64_t bytes;
} annulus_message;

// What this rank sends and receives in one step: at most one message to and one from each peer.
typedef struct annulus_exchange {
  uint64_t plan;  // the same on all ranks; a message of another plan, step or size must be an error on both sides
  int64_t step;
  const annulus_message* sends;  // [send_count]
  int64_t send_count;
  const annulus_message* receives;  // [receive_count]
  int64_t receive_count;
} annulus_exchange;

// How bytes get from rank to rank: functions of the caller's. Those that return an int return 0, or anything else when
// they fail, with a sentence in message[capacity] that ends with a 0; that sentence becomes the error of this rank.
// Ranks of the host and of every GPU use the same functions, so once they have failed or aborted they fail again. All
// four null: a transport for looking ahead, with which a rank knows its memory and traffic and does not compute.
typedef struct annulus_transport_callbacks {
  size_t struct_size;  // sizeof(annulus_transport_callbacks)
  void* context;       // handed to each function; may be null
  int32_t rank;
  int32_t size;
  // Begins to move an exchange; may go on with it until `wait` returns. The structs live until then too.
  int (*post)(void* context, const annulus_exchange* exchange, char* message, size_t capacity);
  // Returns when all has arrived and all that is sent may be overwritten. Fails when its deadline has passed.
  int (*wait)(void* context, char* message, size_t capacity);
  // Makes progress without waiting, from any thread, one at a time; may be null where bytes move on their own.
  int (*poll)(void* context, char* message, size_t capacity);
  // Tells all ranks that this one gives up: their `wait` fails with this text. From any thread, at any time.
  void (*abort)(void* context, const char* text);
  // May be null. Not 0 while `wait` would return, or fail, at once; any thread may write it at any time. GPUs whose
  // payload is staged move on between launches where they can look here, and only inside `wait` where they cannot.
  const int32_t* arrived;
} annulus_transport_callbacks;

typedef struct annulus_transport annulus_transport;
typedef struct annulus_rank_attention annulus_rank_attention;

// *transport is the new handle, or null when this fails.
ANNULUS_API int annulus_transport_create(const annulus_transport_callbacks* callbacks, annulus_transport** transport);
ANNULUS_API void annulus_transport_destroy(annulus_transport* transport);  // null is allowed

// A collective: ranks that were given different things all fail, and are told who and what. `options` may be null. The
// transport must outlive the attention. *attention is the new handle, or null when this fails. On a GPU every pointer
// in a call is to its memory and work is queued on the stream of the call, which returns when the last transfer is
// over, not the work behind it.
ANNULUS_API int annulus_rank_create(const annulus_problem* problem, const annulus_sharding* sharding,
                                    annulus_transport* transport, const annulus_rank_options* options,
                                    annulus_rank_attention** attention);
ANNULUS_API void annulus_rank_destroy(annulus_rank_attention* attention);  // null is allowed

// All ranks make the same calls in the same order. Tensors have `rows` rows (k, v, dk, dv) and `query_rows` rows (q,
// out, lse, dout, dq): the same number, but where queries are replicated.
ANNULUS_API int annulus_rank_forward(const annulus_rank_attention* attention, const annulus_forward_args* args);
ANNULUS_API int annulus_rank_backward(const annulus_rank_attention* attention, const annulus_backward_args* args);
ANNULUS_API int annulus_rank_rows(const annulus_rank_attention* attention, int64_t* rows, int64_t* query_rows);

// As for one rank.
ANNULUS_API int annulus_rank_workspace_bytes(const annulus_rank_attention* attention, int pass, size_t* bytes);
ANNULUS_API int annulus_rank_explain(const annulus_rank_attention* attention, char* buffer, size_t capacity,
                                     size_t* length);
ANNULUS_API int annulus_rank_memory(const annulus_rank_attention* attention, int pass,
                                    annulus_memory_component* components, size_t capacity, size_t* count);

// Payload that a pass moves from and to this rank.
ANNULUS_API int annulus_rank_traffic(const annulus_rank_attention* attention, int pass, int64_t* sent_bytes,
                                     int64_t* received_bytes);

// The positions that rank `rank` owns, in the order of its memory. Writes as many as fit into positions[capacity] and
// sets *count to how many there are. `positions` may be null when capacity is 0.
ANNULUS_API int annulus_positions(const annulus_sharding* sharding, int64_t tokens, int32_t rank, int64_t* positions,
                                  size_t capacity, size_t* count);

#ifdef __cplusplus
}
#endif

// NOLINTEND

#endif  // ANNULUS_ANNULUS_RANKS_H_
