#define _POSIX_C_SOURCE 200809L
#include "pagedllm_mpi.h"

#include <limits.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

// Longest message in MPI_BYTE, whose count is an int. Longer ones consist of blocks.
#ifndef PLLM_MPI_MAX_COUNT
#define PLLM_MPI_MAX_COUNT INT_MAX
#endif
#ifndef PLLM_MPI_BLOCK
#define PLLM_MPI_BLOCK (1 << 20)
#endif

// Messages and broadcasts of this rank that have not ended.
enum { MAX_PENDING = 16 };
// Tests of an operation before a wait sleeps, and the sleeps between later tests.
enum { SPINS = 2000, MIN_NAP_NS = 20000, MAX_NAP_NS = 1000000 };
// Time that `close` gives to pending operations.
enum { CLOSE_SECONDS = 2 };

// A copy of a message, which MPI reads after the call has returned.
typedef struct {
    MPI_Request request;  // MPI_REQUEST_NULL: free
    void *bytes;
    size_t capacity;
} pending_message;

typedef struct {
    MPI_Comm comm;
    int rank, size;
    int has_failed;
    pending_message pending[MAX_PENDING];
} group;

static void nap(long *nanoseconds) {
    struct timespec time = {0, *nanoseconds};
    nanosleep(&time, NULL);
    if (*nanoseconds < MAX_NAP_NS) *nanoseconds *= 2;
}

// Waits until a request ends. A wait of MPI would keep a CPU busy, also while an engine is idle.
static int wait_for(MPI_Request *request) {
    long pause = MIN_NAP_NS;
    for (unsigned tests = 0;; tests++) {
        int is_done = 0, error = MPI_Test(request, &is_done, MPI_STATUS_IGNORE);
        if (error != MPI_SUCCESS || is_done) return error;
        if (tests >= SPINS) nap(&pause);
    }
}

// Waits for the next message of a rank, and for its length. A longer message than expected would be an
// error of MPI, which some implementations do not return but raise in MPI_COMM_WORLD.
static int wait_for_message(const group *g, int from, MPI_Message *message, MPI_Count *len) {
    long pause = MIN_NAP_NS;
    for (unsigned tests = 0;; tests++) {
        int is_there = 0;
        MPI_Status status;
        int error = MPI_Improbe(from, 0, g->comm, &is_there, message, &status);
        if (error != MPI_SUCCESS) return error;
        if (is_there) return MPI_Get_elements_x(&status, MPI_BYTE, len);
        if (tests >= SPINS) nap(&pause);
    }
}

// Describes len bytes by a type and a count. Free the type with free_type.
static int describe(uint64_t len, MPI_Datatype *type, int *count) {
    if (len <= PLLM_MPI_MAX_COUNT) {
        *type = MPI_BYTE;
        *count = (int)len;
        return MPI_SUCCESS;
    }
    if (len / PLLM_MPI_BLOCK > INT_MAX) return MPI_ERR_COUNT;
    int counts[2] = {(int)(len / PLLM_MPI_BLOCK), (int)(len % PLLM_MPI_BLOCK)};
    MPI_Aint places[2] = {0, (MPI_Aint)(len - len % PLLM_MPI_BLOCK)};
    MPI_Datatype types[2] = {MPI_DATATYPE_NULL, MPI_BYTE};
    int error = MPI_Type_contiguous(PLLM_MPI_BLOCK, MPI_BYTE, &types[0]);
    if (error != MPI_SUCCESS) return error;
    *count = 1;
    error = MPI_Type_create_struct(2, counts, places, types, type);
    MPI_Type_free(&types[0]);
    return error != MPI_SUCCESS ? error : MPI_Type_commit(type);
}

// MPI keeps the type of an operation that has started.
static void free_type(MPI_Datatype *type) {
    if (*type != MPI_BYTE) MPI_Type_free(type);
}

// Returns an error number that is not 0 and fails all later calls.
static int32_t fail(group *g, int error) {
    int class = MPI_ERR_OTHER;
    g->has_failed = 1;
    if (error != MPI_SUCCESS) MPI_Error_class(error, &class);
    return class == MPI_SUCCESS ? MPI_ERR_OTHER : class;
}

static int32_t result(group *g, int error) { return error == MPI_SUCCESS ? 0 : fail(g, error); }

// Returns a copy of the bytes whose request is free. If there is none, waits for the oldest request.
static int copy_message(group *g, const void *bytes, uint64_t len, pending_message **out) {
    pending_message *found = NULL;
    for (int i = 0; i < MAX_PENDING; i++) {
        pending_message *p = &g->pending[i];
        int is_done = 1;
        if (p->request != MPI_REQUEST_NULL) {
            int error = MPI_Test(&p->request, &is_done, MPI_STATUS_IGNORE);
            if (error != MPI_SUCCESS) return error;
        }
        if (is_done && (!found || (found->capacity < len && p->capacity > found->capacity))) found = p;
    }
    if (!found) {
        // They are in no order, but each of them ends.
        found = &g->pending[0];
        int error = wait_for(&found->request);
        if (error != MPI_SUCCESS) return error;
    }
    if (found->capacity < len) {
        free(found->bytes);
        found->bytes = malloc(len);
        found->capacity = found->bytes ? len : 0;
        if (!found->bytes) return MPI_ERR_NO_MEM;
    }
    if (len > 0) memcpy(found->bytes, bytes, len);
    *out = found;
    return MPI_SUCCESS;
}

static int32_t broadcast(void *user_data, void *bytes, uint64_t len, uint32_t root,
                         uint64_t timeout_ms) {
    group *g = user_data;
    (void)timeout_ms;
    if (g->has_failed) return MPI_ERR_OTHER;
    MPI_Datatype type;
    MPI_Request request;
    int count, error = describe(len, &type, &count);
    if (error != MPI_SUCCESS) return fail(g, error);
    if (root == (uint32_t)g->rank) {
        pending_message *copy;
        error = copy_message(g, bytes, len, &copy);
        if (error == MPI_SUCCESS)
            error = MPI_Ibcast(copy->bytes, count, type, (int)root, g->comm, &copy->request);
    } else {
        error = MPI_Ibcast(bytes, count, type, (int)root, g->comm, &request);
        if (error == MPI_SUCCESS) error = wait_for(&request);
    }
    free_type(&type);
    return result(g, error);
}

typedef int collective(const void *, int, MPI_Datatype, void *, int, MPI_Datatype, MPI_Comm,
                       MPI_Request *);

// Runs a collective operation in which each rank gives len bytes to each other one.
static int32_t run(group *g, collective *operation, const void *bytes, uint64_t len, void *out) {
    if (g->has_failed) return MPI_ERR_OTHER;
    MPI_Datatype type;
    MPI_Request request;
    int count, error = describe(len, &type, &count);
    if (error != MPI_SUCCESS) return fail(g, error);
    error = operation(bytes, count, type, out, count, type, g->comm, &request);
    if (error == MPI_SUCCESS) error = wait_for(&request);
    free_type(&type);
    return result(g, error);
}

static int32_t all_gather(void *user_data, const void *bytes, uint64_t len, void *out,
                          uint64_t timeout_ms) {
    (void)timeout_ms;
    return run(user_data, MPI_Iallgather, bytes, len, out);
}

static int32_t all_to_all(void *user_data, const void *bytes, uint64_t len, void *out,
                          uint64_t timeout_ms) {
    (void)timeout_ms;
    return run(user_data, MPI_Ialltoall, bytes, len, out);
}

static int32_t send_bytes(void *user_data, const void *bytes, uint64_t len, uint32_t to,
                          uint64_t timeout_ms) {
    group *g = user_data;
    (void)timeout_ms;
    if (g->has_failed) return MPI_ERR_OTHER;
    MPI_Datatype type;
    pending_message *copy;
    int count, error = describe(len, &type, &count);
    if (error != MPI_SUCCESS) return fail(g, error);
    error = copy_message(g, bytes, len, &copy);
    if (error == MPI_SUCCESS)
        error = MPI_Isend(copy->bytes, count, type, (int)to, 0, g->comm, &copy->request);
    free_type(&type);
    return result(g, error);
}

static int32_t receive(void *user_data, void *bytes, uint64_t len, uint32_t from,
                       uint64_t timeout_ms) {
    group *g = user_data;
    (void)timeout_ms;
    if (g->has_failed) return MPI_ERR_OTHER;
    MPI_Datatype type;
    MPI_Request request;
    MPI_Message message;
    MPI_Count sent;
    int count, error = wait_for_message(g, (int)from, &message, &sent);
    if (error == MPI_SUCCESS && (uint64_t)sent != len) error = MPI_ERR_TRUNCATE;
    if (error == MPI_SUCCESS) error = describe(len, &type, &count);
    if (error != MPI_SUCCESS) return fail(g, error);
    error = MPI_Imrecv(bytes, count, type, &message, &request);
    if (error == MPI_SUCCESS) error = wait_for(&request);
    free_type(&type);
    return result(g, error);
}

static group *create(MPI_Comm comm) {
    group *g = calloc(1, sizeof *g);
    if (!g) return NULL;
    g->comm = comm;
    for (int i = 0; i < MAX_PENDING; i++) g->pending[i].request = MPI_REQUEST_NULL;
    // The host process must not be ended by an error.
    MPI_Comm_set_errhandler(comm, MPI_ERRORS_RETURN);
    MPI_Comm_rank(comm, &g->rank);
    MPI_Comm_size(comm, &g->size);
    return g;
}

static int32_t split(void *user_data, uint32_t color, uint64_t timeout_ms, void **out_user_data,
                     uint32_t *out_rank, uint32_t *out_size) {
    group *g = user_data;
    (void)timeout_ms;
    if (g->has_failed) return MPI_ERR_OTHER;
    if (color > INT_MAX) return fail(g, MPI_ERR_ARG);
    MPI_Comm comm;
    int error = MPI_Comm_split(g->comm, (int)color, g->rank, &comm);
    if (error != MPI_SUCCESS) return fail(g, error);
    group *part = create(comm);
    if (!part) {
        MPI_Comm_free(&comm);
        return fail(g, MPI_ERR_NO_MEM);
    }
    *out_user_data = part;
    *out_rank = (uint32_t)part->rank;
    *out_size = (uint32_t)part->size;
    return 0;
}

// Waits for the pending operations for some time. Returns whether all have ended.
static int end_pending(group *g) {
    time_t start = time(NULL);
    long pause = MIN_NAP_NS;
    for (;;) {
        int all = 1;
        for (int i = 0; i < MAX_PENDING; i++) {
            int is_done = 1;
            MPI_Request *request = &g->pending[i].request;
            if (*request != MPI_REQUEST_NULL &&
                MPI_Test(request, &is_done, MPI_STATUS_IGNORE) != MPI_SUCCESS)
                return 0;
            all &= is_done;
        }
        if (all || time(NULL) > start + CLOSE_SECONDS) return all;
        nap(&pause);
    }
}

static void close_group(void *user_data) {
    group *g = user_data;
    int is_finalized = 0;
    MPI_Finalized(&is_finalized);
    // MPI may still read the copies, so they are lost if their operations do not end. A communicator
    // cannot be freed after an error, since the other ranks may not do so.
    if (!is_finalized && (g->has_failed || !end_pending(g))) return;
    for (int i = 0; i < MAX_PENDING; i++) free(g->pending[i].bytes);
    if (!is_finalized) MPI_Comm_free(&g->comm);
    free(g);
}

int pllm_mpi_communicator(MPI_Comm comm, pllm_communicator *out_communicator) {
    int is_initialized = 0, is_finalized = 0, level = MPI_THREAD_SINGLE;
    if (!out_communicator || out_communicator->struct_size < sizeof *out_communicator)
        return MPI_ERR_ARG;
    MPI_Initialized(&is_initialized);
    MPI_Finalized(&is_finalized);
    if (!is_initialized || is_finalized) return MPI_ERR_OTHER;
    MPI_Query_thread(&level);
    if (level < MPI_THREAD_SERIALIZED) return MPI_ERR_OTHER;
    MPI_Comm copy;
    int error = MPI_Comm_dup(comm, &copy);
    if (error != MPI_SUCCESS) return error;
    group *g = create(copy);
    if (!g) {
        MPI_Comm_free(&copy);
        return MPI_ERR_NO_MEM;
    }
    uint64_t struct_size = out_communicator->struct_size;
    memset(out_communicator, 0, struct_size);
    *out_communicator = (pllm_communicator){
        .struct_size = struct_size,
        .user_data = g,
        .rank = (uint32_t)g->rank,
        .size = (uint32_t)g->size,
        .broadcast = broadcast,
        .all_gather = all_gather,
        .all_to_all = all_to_all,
        .send = send_bytes,
        .receive = receive,
        .split = split,
        .close = close_group,
    };
    return MPI_SUCCESS;
}
