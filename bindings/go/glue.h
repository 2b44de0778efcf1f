// Parts of the Go package in C, for fewer cgo calls and for a progress callback that does not call
// into Go.
#ifndef PAGEDLLM_GO_GLUE_H
#define PAGEDLLM_GO_GLUE_H

#include <pagedllm.h>
#include <stdlib.h>

typedef struct {
    pllm_outputs *outputs;  // NULL if there are none
    const pllm_output *first;
    uint64_t len;
} output_batch;

// Takes all outputs from the queue without waiting.
static inline pllm_error *take_outputs(const pllm_queue *queue, output_batch *out) {
    pllm_outputs *outputs;
    pllm_error *error = pllm_queue_poll(queue, 0, &outputs);
    if (error) return error;
    out->len = pllm_outputs_len(outputs);
    out->first = pllm_outputs_get(outputs, 0);
    if (out->len == 0) {
        pllm_outputs_free(outputs);
        outputs = 0;
    }
    out->outputs = outputs;
    return 0;
}

// Allocates the ids of n children. NULL if there is no memory. Unwritten pages use no memory.
static inline uint64_t *room_for_ids(uint32_t n) { return malloc((n + (uint64_t)1) * sizeof(uint64_t)); }

// Shared by the loading thread and the goroutine that watches it.
typedef struct {
    uint64_t done, total;
    uint32_t cancelled;
} load_state;

static inline int32_t note_progress(void *data, uint64_t done, uint64_t total) {
    load_state *state = data;
    __atomic_store_n(&state->total, total, __ATOMIC_SEQ_CST);
    __atomic_store_n(&state->done, done, __ATOMIC_SEQ_CST);
    return (int32_t)__atomic_load_n(&state->cancelled, __ATOMIC_SEQ_CST);
}

static inline pllm_error *create_engine(const pllm_engine_options *options, load_state *state, pllm_engine **out_engine) {
    pllm_engine_options watched = *options;
    watched.progress = note_progress;
    watched.progress_data = state;
    return pllm_engine_create(&watched, out_engine);
}

static inline pllm_error *run_worker(const pllm_engine_options *options, load_state *state) {
    pllm_engine_options watched = *options;
    watched.progress = note_progress;
    watched.progress_data = state;
    return pllm_worker_run(&watched);
}

static inline void close_communicator(const pllm_communicator *communicator) { communicator->close(communicator->user_data); }

#endif
