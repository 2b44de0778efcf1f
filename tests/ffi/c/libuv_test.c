// One libuv loop on one thread waits on the event descriptors of eight queues.
// usage: libuv_test MODEL_DIR
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <uv.h>

#include "pagedllm.h"

enum { READERS = 8, TOKENS = 24 };

typedef struct {
    uv_poll_t poll;
    pllm_queue *queue;
    uint32_t tokens[TOKENS];
    uint64_t generated;
    int ended;
} reader;

static void check(pllm_error *error) {
    if (!error) return;
    fprintf(stderr, "error %d: %s\n", pllm_error_code(error), pllm_error_message(error));
    exit(1);
}

static void must(int holds, const char *condition) {
    if (holds) return;
    fprintf(stderr, "failed: %s\n", condition);
    exit(1);
}

static void on_readable(uv_poll_t *poll, int status, int events) {
    reader *s = poll->data;
    must(status == 0 && (events & UV_READABLE), "the loop reports that the queue is readable");
    pllm_outputs *outputs;
    check(pllm_queue_poll(s->queue, 0, &outputs));
    must(pllm_outputs_len(outputs) > 0, "a readable queue has outputs");
    for (uint64_t i = 0; i < pllm_outputs_len(outputs); i++) {
        const pllm_output *o = pllm_outputs_get(outputs, i);
        must(s->generated + o->tokens_len <= TOKENS, "at most max_tokens tokens");
        memcpy(s->tokens + s->generated, o->tokens, o->tokens_len * sizeof *o->tokens);
        s->generated += o->tokens_len;
        s->ended = o->finish_reason == PLLM_FINISH_LENGTH;
    }
    pllm_outputs_free(outputs);
    if (s->ended) uv_poll_stop(poll);
}

int main(int argc, char **argv) {
    must(argc == 2, "usage: libuv_test MODEL_DIR");
    pllm_engine_options options;
    pllm_engine_options_init(&options, sizeof options);
    options.model_path = argv[1];
    options.threads = 1;
    pllm_engine *engine;
    check(pllm_engine_create(&options, &engine));
    check(pllm_engine_start(engine));

    static reader readers[READERS];
    uv_loop_t *loop = uv_default_loop();
    const uint32_t prompt[] = {7, 8, 9};
    pllm_sampling sampling;
    pllm_sampling_init(&sampling, sizeof sampling);
    sampling.temperature = 0;
    sampling.max_tokens = TOKENS;
    sampling.flags = PLLM_SAMPLING_IGNORE_EOS;
    for (int i = 0; i < READERS; i++) {
        int32_t fd;
        check(pllm_queue_create(engine, 4, &readers[i].queue));
        check(pllm_queue_get_event_fd(readers[i].queue, &fd));
        must(uv_poll_init(loop, &readers[i].poll, fd) == 0,
             "uv_poll_init of the descriptor succeeds");
        readers[i].poll.data = &readers[i];
        must(uv_poll_start(&readers[i].poll, UV_READABLE, on_readable) == 0,
             "uv_poll_start succeeds");
        pllm_request request;
        pllm_request_init(&request, sizeof request);
        request.prompt_token_ids = prompt;
        request.prompt_token_ids_len = 3;
        request.sampling = &sampling;
        request.queue = readers[i].queue;
        uint64_t id;
        check(pllm_engine_add_request(engine, &request, &id));
    }
    uv_run(loop, UV_RUN_DEFAULT);  // until every request has ended
    for (int i = 0; i < READERS; i++) {
        must(readers[i].ended && readers[i].generated == TOKENS,
             "every request ends with all its tokens");
        must(!memcmp(readers[i].tokens, readers[0].tokens, sizeof readers[i].tokens),
             "equal requests get equal tokens");
        uv_close((uv_handle_t *)&readers[i].poll, NULL);
    }
    uv_run(loop, UV_RUN_DEFAULT);
    must(uv_loop_close(loop) == 0, "the loop has no handle left");
    for (int i = 0; i < READERS; i++) pllm_queue_free(readers[i].queue);
    pllm_engine_free(engine);
    puts("passed   one_libuv_loop_serves_eight_queues");
}
