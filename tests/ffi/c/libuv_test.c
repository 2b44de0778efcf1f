// libuv waits on the queues' descriptors: eight streams in one loop and one thread.
// usage: libuv_test MODEL_DIR
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <uv.h>

#include "pagedllm.h"

enum { STREAMS = 8, TOKENS = 24 };

typedef struct {
    uv_poll_t poll;
    pllm_queue *queue;
    uint32_t tokens[TOKENS];
    uint64_t generated;
    int ended;
} stream;

static void check(pllm_error *error) {
    if (!error) return;
    fprintf(stderr, "error %d: %s\n", pllm_error_code(error), pllm_error_message(error));
    exit(1);
}

static void must(int holds, const char *what) {
    if (holds) return;
    fprintf(stderr, "failed: %s\n", what);
    exit(1);
}

static void on_readable(uv_poll_t *poll, int status, int events) {
    stream *s = poll->data;
    must(status == 0 && (events & UV_READABLE), "the loop reports that the queue is readable");
    pllm_outputs *outputs;
    check(pllm_queue_poll(s->queue, 0, &outputs));
    must(pllm_outputs_len(outputs) > 0, "a readable queue has outputs");
    for (uint64_t i = 0; i < pllm_outputs_len(outputs); i++) {
        const pllm_output *o = pllm_outputs_get(outputs, i);
        must(s->generated + o->tokens_len <= TOKENS, "no more tokens than asked for");
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

    static stream streams[STREAMS];
    uv_loop_t *loop = uv_default_loop();
    const uint32_t prompt[] = {7, 8, 9};
    pllm_sampling sampling;
    pllm_sampling_init(&sampling, sizeof sampling);
    sampling.temperature = 0;
    sampling.max_tokens = TOKENS;
    sampling.flags = PLLM_SAMPLING_IGNORE_EOS;
    for (int i = 0; i < STREAMS; i++) {
        int32_t fd;
        check(pllm_queue_create(engine, 4, &streams[i].queue));
        check(pllm_queue_get_event_fd(streams[i].queue, &fd));
        must(uv_poll_init(loop, &streams[i].poll, fd) == 0, "libuv takes the descriptor");
        streams[i].poll.data = &streams[i];
        must(uv_poll_start(&streams[i].poll, UV_READABLE, on_readable) == 0, "libuv waits on it");
        pllm_request request;
        pllm_request_init(&request, sizeof request);
        request.prompt_token_ids = prompt;
        request.prompt_token_ids_len = 3;
        request.sampling = &sampling;
        request.queue = streams[i].queue;
        uint64_t id;
        check(pllm_engine_add_request(engine, &request, &id));
    }
    uv_run(loop, UV_RUN_DEFAULT);  // until no stream is waited for
    for (int i = 0; i < STREAMS; i++) {
        must(streams[i].ended && streams[i].generated == TOKENS, "every stream ends with all its tokens");
        must(!memcmp(streams[i].tokens, streams[0].tokens, sizeof streams[i].tokens), "equal requests get equal tokens");
        uv_close((uv_handle_t *)&streams[i].poll, NULL);
    }
    uv_run(loop, UV_RUN_DEFAULT);
    must(uv_loop_close(loop) == 0, "nothing is left in the loop");
    for (int i = 0; i < STREAMS; i++) pllm_queue_free(streams[i].queue);
    pllm_engine_free(engine);
    puts("libuv: 8 streams in one loop");
}
