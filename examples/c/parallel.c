// Divides a model among devices or processes and asks it a question. Start one process for each rank;
// rank 0 prints the answer.
//
// One process with several devices:
//   parallel MODEL_DIR cuda:0,cuda:1
// Processes of one host, which meet at a file:
//   parallel MODEL_DIR TENSOR PIPELINE RANK /dev/shm/some-name
// Processes of MPI (compiled with -DPAGEDLLM_MPI by mpicc, linked with bindings/mpi):
//   mpirun -n 2 parallel MODEL_DIR 2 1
#include <stdio.h>
#include <stdlib.h>

#include "pagedllm.h"
#ifdef PAGEDLLM_MPI
#include "pagedllm_mpi.h"
#endif

enum { TIMEOUT_MS = 30000 };

static void check(pllm_error *error) {
    if (!error) return;
    fprintf(stderr, "error %d: %s\n", pllm_error_code(error), pllm_error_message(error));
    exit(1);
}

// Connects this process with the others.
static void connect_ranks(pllm_communicator *world, uint32_t size, char **arguments) {
    *world = (pllm_communicator){.struct_size = sizeof *world};
#ifdef PAGEDLLM_MPI
    (void)size, (void)arguments;
    if (pllm_mpi_communicator(MPI_COMM_WORLD, world) != MPI_SUCCESS) {
        fprintf(stderr, "no communicator\n");
        exit(1);
    }
#else
    uint32_t rank = (uint32_t)strtoul(arguments[0], NULL, 10);
    check(pllm_communicator_shared_memory(arguments[1], rank, size, TIMEOUT_MS, world));
#endif
}

// Generates an answer on rank 0, while the other ranks run workers.
static void ask(pllm_engine *engine, const char *question) {
    char json[256];
    snprintf(json, sizeof json, "[{\"role\": \"user\", \"content\": \"%s\"}]", question);
    pllm_bytes *prompt;
    check(pllm_engine_render_chat(engine, json, PLLM_NUL_TERMINATED, &prompt));
    pllm_sampling greedy;
    pllm_sampling_init(&greedy, sizeof greedy);
    greedy.temperature = 0;
    pllm_request request;
    pllm_request_init(&request, sizeof request);
    request.prompt = pllm_bytes_data(prompt);
    request.prompt_len = pllm_bytes_len(prompt);
    request.text_flags = PLLM_TEXT_SKIP_SPECIAL;  // the template has written the special tokens
    request.sampling = &greedy;
    uint64_t id;
    check(pllm_engine_add_request(engine, &request, &id));
    pllm_bytes_free(prompt);
    pllm_step step = {.struct_size = sizeof step};
    do {
        check(pllm_engine_step(engine, &step));
        pllm_outputs *outputs;
        check(pllm_queue_poll(pllm_engine_queue(engine), 0, &outputs));
        for (uint64_t i = 0; i < pllm_outputs_len(outputs); i++) {
            const pllm_output *output = pllm_outputs_get(outputs, i);
            printf("%.*s", (int)output->text_len, output->text ? output->text : "");
        }
        pllm_outputs_free(outputs);
        fflush(stdout);
    } while (step.unfinished);
    printf("\n");
}

static void create_and_ask(const pllm_engine_options *options) {
    pllm_engine *engine;
    check(pllm_engine_create(options, &engine));
    ask(engine, "What is the capital of France?");
    pllm_engine_free(engine);
}

int main(int argc, char **argv) {
#ifdef PAGEDLLM_MPI
    const int needed = 4;
    int threads;
    // An engine may be stepped by one thread and created by another.
    MPI_Init_thread(&argc, &argv, MPI_THREAD_SERIALIZED, &threads);
#else
    const int needed = 6;
#endif
    if (argc < needed && argc != 3) {
        fprintf(stderr, "usage: %s MODEL_DIR DEVICES\n       %s MODEL_DIR TENSOR PIPELINE%s\n", argv[0], argv[0],
                needed > 4 ? " RANK FILE" : "");
        return 2;
    }
    pllm_engine_options options;
    pllm_engine_options_init(&options, sizeof options);
    options.model_path = argv[1];
    options.threads = 1;
    if (argc == 3) {
        options.device = argv[2];
        create_and_ask(&options);
        return 0;
    }
    options.tensor_parallel = (uint32_t)strtoul(argv[2], NULL, 10);
    options.pipeline_parallel = (uint32_t)strtoul(argv[3], NULL, 10);
    options.worker_timeout_ms = TIMEOUT_MS;
    pllm_communicator world;
    connect_ranks(&world, options.tensor_parallel * options.pipeline_parallel, argv + 4);
    options.communicator = &world;
    if (world.rank > 0) {
        check(pllm_worker_run(&options));  // returns when rank 0 frees the engine
    } else {
        create_and_ask(&options);
    }
#ifdef PAGEDLLM_MPI
    MPI_Finalize();
#endif
}
