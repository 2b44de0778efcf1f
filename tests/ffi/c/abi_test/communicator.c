// Communicators of processes and threads of this host: the functions, the start and the end.
#include "abi_test.h"

#include <pthread.h>
#include <sys/wait.h>

enum { RANKS = 3, LEN = 100000 };

static const uint64_t LIMIT_MS = 300000;

static const char *group_path(void) {
    static char path[64];
    const char *dir = access("/dev/shm", W_OK) == 0 ? "/dev/shm" : "/tmp";
    snprintf(path, sizeof path, "%s/pagedllm-abi-test-%d", dir, (int)getpid());
    return path;
}

static uint8_t byte_of(uint32_t from, uint32_t to, uint64_t i) {
    return (uint8_t)(from * 17 + to * 5 + i + i / 251);
}

static void fill(uint8_t *bytes, uint32_t from, uint32_t to) {
    for (uint64_t i = 0; i < LEN; i++) bytes[i] = byte_of(from, to, i);
}

static int is_from(const uint8_t *bytes, uint32_t from, uint32_t to) {
    uint64_t i = 0;
    while (i < LEN && bytes[i] == byte_of(from, to, i)) i++;
    return i == LEN;
}

// Calls all functions except split and close.
static void check_group(const pllm_communicator *c, uint8_t *bytes, uint8_t *out) {
    for (uint32_t root = 0; root < c->size; root++) {
        memset(bytes, 0, LEN);
        if (c->rank == root) fill(bytes, root, 0);
        CHECK(c->broadcast(c->user_data, bytes, LEN, root, LIMIT_MS) == 0 && is_from(bytes, root, 0));
    }
    fill(bytes, c->rank, 1);
    CHECK(c->all_gather(c->user_data, bytes, LEN, out, LIMIT_MS) == 0);
    for (uint32_t i = 0; i < c->size; i++) CHECK(is_from(out + i * LEN, i, 1));
    for (uint32_t i = 0; i < c->size; i++) fill(bytes + i * LEN, c->rank, i);
    CHECK(c->all_to_all(c->user_data, bytes, LEN, out, 0) == 0);
    for (uint32_t i = 0; i < c->size; i++) CHECK(is_from(out + i * LEN, i, c->rank));
    if (c->size == 1) return;
    uint32_t next = (c->rank + 1) % c->size, last = (c->rank + c->size - 1) % c->size;
    for (uint32_t i = 0; i < 2; i++) {
        fill(bytes, c->rank, i);
        CHECK(c->send(c->user_data, bytes, LEN, next, LIMIT_MS) == 0);
    }
    for (uint32_t i = 0; i < 2; i++)
        CHECK(c->receive(c->user_data, out, LEN, last, LIMIT_MS) == 0 && is_from(out, last, i));
}

static void *run_rank(void *rank) {
    pllm_communicator c = {.struct_size = sizeof c}, part;
    uint32_t number = (uint32_t)(uintptr_t)rank;
    uint8_t *bytes = malloc(RANKS * LEN), *out = malloc(RANKS * LEN);
    if (OK(pllm_communicator_shared_memory(group_path(), number, RANKS, LIMIT_MS, &c))) {
        CHECK(c.rank == number && c.size == RANKS);
        check_group(&c, bytes, out);
        part = c;
        CHECK(c.split(c.user_data, number % 2, LIMIT_MS, &part.user_data, &part.rank, &part.size) == 0);
        CHECK(part.rank == number / 2 && part.size == (number % 2 ? 1 : 2));
        check_group(&part, bytes, out);
        part.close(part.user_data);
        // A message to this rank is an error, and the last one.
        if (number == 0) CHECK(c.send(c.user_data, bytes, 1, 0, LIMIT_MS) == PLLM_E_INTERNAL);
        CHECK(c.receive(c.user_data, bytes, 1, (number + 1) % RANKS, LIMIT_MS) == PLLM_E_INTERNAL);
        c.close(c.user_data);
    }
    free(bytes);
    free(out);
    return NULL;
}

static void ranks_of_shared_memory_exchange_bytes(void) {
    pthread_t threads[RANKS];
    for (uintptr_t rank = 0; rank < RANKS; rank++)
        CHECK(pthread_create(&threads[rank], NULL, run_rank, (void *)rank) == 0);
    for (int rank = 0; rank < RANKS; rank++) pthread_join(threads[rank], NULL);
    CHECK(access(group_path(), F_OK) != 0);
}

static void invalid_groups_are_refused(void) {
    pllm_communicator c;
    memset(&c, POISON, sizeof c);
    c.struct_size = sizeof c;
    INVALID(pllm_communicator_shared_memory(NULL, 0, 1, 1, &c));
    INVALID(pllm_communicator_shared_memory("\xff", 0, 1, 1, &c));
    INVALID(pllm_communicator_shared_memory(group_path(), 0, 1, 1, NULL));
    INVALID(pllm_communicator_shared_memory(group_path(), 0, 0, 1, &c));
    INVALID(pllm_communicator_shared_memory(group_path(), 0, 65, 1, &c));
    INVALID(pllm_communicator_shared_memory(group_path(), 2, 2, 1, &c));
    FAILS(PLLM_E_IO, pllm_communicator_shared_memory(group_path(), 0, 2, 1, &c));
    FAILS(PLLM_E_IO, pllm_communicator_shared_memory(group_path(), 1, 2, 1, &c));
    FAILS(PLLM_E_IO, pllm_communicator_shared_memory("/nonexistent/group", 0, 1, 1, &c));
    CHECK(all_bytes_are(&c, 8, sizeof c, POISON));
    c.struct_size = sizeof c - 8;
    INVALID(pllm_communicator_shared_memory(group_path(), 0, 1, 1, &c));
    CHECK(access(group_path(), F_OK) != 0);
}

static void a_rank_is_used_once_and_not_after_a_fork(void) {
    pllm_communicator c = {.struct_size = sizeof c}, second = c;
    uint8_t bytes[2] = {1, 2};
    if (!OK(pllm_communicator_shared_memory(group_path(), 0, 1, 0, &c))) return;
    INVALID(pllm_communicator_shared_memory(group_path(), 0, 1, 0, &second));
    pid_t child = fork();
    if (child == 0) {
        int32_t code = c.broadcast(c.user_data, bytes, sizeof bytes, 0, 0);
        c.close(c.user_data);
        _exit(code == PLLM_E_UNSUPPORTED ? 0 : 1);
    }
    int status = 1;
    CHECK(waitpid(child, &status, 0) == child && status == 0);
    CHECK(c.broadcast(c.user_data, bytes, sizeof bytes, 0, 0) == 0);
    INVALID(pllm_communicator_shared_memory(group_path(), 0, 1, 0, &second));
    CHECK(c.broadcast(c.user_data, NULL, 1, 0, 0) == PLLM_E_INVALID_ARGUMENT);
    c.close(c.user_data);
    c.close(NULL);
    CHECK(c.broadcast(NULL, bytes, 1, 0, 0) == PLLM_E_INVALID_ARGUMENT);
    if (OK(pllm_communicator_shared_memory(group_path(), 0, 1, 0, &second)))
        second.close(second.user_data);
}

const test communicator_tests[] = {
    ALONE(ranks_of_shared_memory_exchange_bytes),
    ALONE(invalid_groups_are_refused),
    ALONE(a_rank_is_used_once_and_not_after_a_fork),
    {0},
};
