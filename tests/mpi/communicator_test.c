// Tests the communicator of bindings/mpi on all ranks of mpirun: the same random calls on each, compared
// with the expected bytes.
//   usage: communicator_test [SEED]
// It fails if a rank exits with another code than 0.
#include <mpi.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "pagedllm_mpi.h"

enum { CALLS = 150, MAX_LEN = 300000 };

static int world_rank;

#define CHECK(condition) ((condition) ? (void)0 : fail(#condition, __LINE__))

static void fail(const char *condition, int line) {
    fprintf(stderr, "rank %d, line %d: %s\n", world_rank, line, condition);
    // Ends all ranks, so that none of them waits.
    MPI_Abort(MPI_COMM_WORLD, 1);
    exit(1);
}

static void *allocate(size_t bytes) {
    void *memory = malloc(bytes + 1);
    CHECK(memory != NULL);
    return memory;
}

typedef struct {
    uint64_t state;
} numbers;

static uint32_t below(numbers *n, uint32_t limit) {
    n->state = n->state * 6364136223846793005u + 1442695040888963407u;
    return (uint32_t)(n->state >> 33) % limit;
}

static uint64_t any_length(numbers *n) {
    switch (below(n, 4)) {
        case 0: return below(n, 4);
        case 1: return 990 + below(n, 20);  // the maximum count of the second build
        case 2: return below(n, 5000);
        default: return below(n, MAX_LEN);
    }
}

static uint8_t byte_of(uint32_t from, uint32_t to, uint32_t call, uint64_t i) {
    return (uint8_t)(from * 101 + to * 31 + call * 7 + i + i / 253);
}

static void fill(uint8_t *bytes, uint64_t len, uint32_t from, uint32_t to, uint32_t call) {
    for (uint64_t i = 0; i < len; i++) bytes[i] = byte_of(from, to, call, i);
}

static int is_from(const uint8_t *bytes, uint64_t len, uint32_t from, uint32_t to, uint32_t call) {
    uint64_t i = 0;
    while (i < len && bytes[i] == byte_of(from, to, call, i)) i++;
    return i == len;
}

static void broadcast(const pllm_communicator *c, numbers *n, uint32_t call) {
    // The root does not wait for each of them.
    uint64_t len = any_length(n);
    uint32_t root = below(n, c->size), times = 1 + below(n, 3);
    uint8_t *bytes = allocate(len);
    for (uint32_t i = 0; i < times; i++) {
        memset(bytes, 0, len);
        if (c->rank == root) fill(bytes, len, root, i, call);
        CHECK(c->broadcast(c->user_data, bytes, len, root, 0) == 0);
        CHECK(is_from(bytes, len, root, i, call));
        // The copy, not the buffer, is on its way.
        memset(bytes, 0xEE, len);
    }
    free(bytes);
}

static void all_gather(const pllm_communicator *c, numbers *n, uint32_t call) {
    uint64_t len = any_length(n);
    uint8_t *bytes = allocate(len), *out = allocate(len * c->size);
    fill(bytes, len, c->rank, 0, call);
    CHECK(c->all_gather(c->user_data, bytes, len, out, 0) == 0);
    for (uint32_t i = 0; i < c->size; i++) CHECK(is_from(out + i * len, len, i, 0, call));
    free(bytes);
    free(out);
}

static void all_to_all(const pllm_communicator *c, numbers *n, uint32_t call) {
    uint64_t len = any_length(n);
    uint8_t *bytes = allocate(len * c->size), *out = allocate(len * c->size);
    for (uint32_t i = 0; i < c->size; i++) fill(bytes + i * len, len, c->rank, i, call);
    CHECK(c->all_to_all(c->user_data, bytes, len, out, 0) == 0);
    for (uint32_t i = 0; i < c->size; i++) CHECK(is_from(out + i * len, len, i, c->rank, call));
    free(bytes);
    free(out);
}

// All ranks send several messages before they receive one.
static void messages_in_a_ring(const pllm_communicator *c, numbers *n, uint32_t call) {
    uint64_t len = below(n, 10) == 0 ? 3000000 : any_length(n);
    uint32_t next = (c->rank + 1) % c->size, last = (c->rank + c->size - 1) % c->size;
    uint32_t times = 1 + below(n, 4);
    if (c->size == 1) return;
    uint8_t *bytes = allocate(len);
    for (uint32_t i = 0; i < times; i++) {
        fill(bytes, len, c->rank, i, call);
        CHECK(c->send(c->user_data, bytes, len, next, 0) == 0);
    }
    for (uint32_t i = 0; i < times; i++) {
        CHECK(c->receive(c->user_data, bytes, len, last, 0) == 0);
        CHECK(is_from(bytes, len, last, i, call));
    }
    free(bytes);
}

static void random_call(const pllm_communicator *c, numbers *n, uint32_t call) {
    switch (below(n, 4)) {
        case 0: broadcast(c, n, call); break;
        case 1: all_gather(c, n, call); break;
        case 2: all_to_all(c, n, call); break;
        default: messages_in_a_ring(c, n, call);
    }
}

static pllm_communicator split(const pllm_communicator *c, uint32_t color) {
    pllm_communicator part = *c;
    CHECK(c->split(c->user_data, color, 0, &part.user_data, &part.rank, &part.size) == 0);
    return part;
}

static void a_message_of_another_length_is_an_error(const pllm_communicator *c) {
    uint8_t bytes[2000] = {0};
    // A shorter and a longer message.
    for (uint64_t len = 1500; len <= 1502; len += 2) {
        pllm_communicator part = split(c, c->rank < 2);
        if (part.size == 2) {
            if (part.rank == 0) CHECK(part.send(part.user_data, bytes, len, 1, 0) == 0);
            if (part.rank == 1) {
                CHECK(part.receive(part.user_data, bytes, 1501, 0, 0) != 0);
                CHECK(part.receive(part.user_data, bytes, 1501, 0, 0) != 0);
            }
        }
        part.close(part.user_data);
    }
}

int main(int argc, char **argv) {
    int level, size;
    pllm_communicator c = {.struct_size = sizeof c};
    if (pllm_mpi_communicator(MPI_COMM_WORLD, &c) != MPI_ERR_OTHER) return 2;
    MPI_Init_thread(&argc, &argv, MPI_THREAD_SERIALIZED, &level);
    MPI_Comm_rank(MPI_COMM_WORLD, &world_rank);
    MPI_Comm_size(MPI_COMM_WORLD, &size);
    CHECK(level >= MPI_THREAD_SERIALIZED);
    CHECK(pllm_mpi_communicator(MPI_COMM_WORLD, NULL) == MPI_ERR_ARG);
    c.struct_size = sizeof c - 8;
    CHECK(pllm_mpi_communicator(MPI_COMM_WORLD, &c) == MPI_ERR_ARG);
    c.struct_size = sizeof c;
    CHECK(pllm_mpi_communicator(MPI_COMM_WORLD, &c) == MPI_SUCCESS);
    CHECK(c.rank == (uint32_t)world_rank && c.size == (uint32_t)size);

    uint64_t seed = argc > 1 ? strtoull(argv[1], NULL, 10) : 1;
    uint32_t color = c.rank % 2;
    pllm_communicator part = split(&c, color);
    CHECK(part.rank == c.rank / 2 && part.size == (c.size + 1 - color) / 2);
    numbers all = {seed}, some = {seed + 1 + color};
    for (uint32_t call = 0; call < CALLS; call++) {
        random_call(&c, &all, call);
        if (call % 3 == 0) random_call(&part, &some, call);
    }
    part.close(part.user_data);
    a_message_of_another_length_is_an_error(&c);
    uint8_t byte = 0;
    CHECK(c.broadcast(c.user_data, &byte, 1, 0, 0) == 0);
    if (c.rank == 0) {
        CHECK(c.send(c.user_data, &byte, 1, c.size, 0) != 0);
        CHECK(c.broadcast(c.user_data, &byte, 1, 0, 0) != 0);
    }
    c.close(c.user_data);
    printf("rank %d of %d: passed\n", world_rank, size);
    MPI_Finalize();
    return 0;
}
