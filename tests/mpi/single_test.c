// A program that has started MPI for a single thread gets no communicator.
#include <mpi.h>
#include <stdio.h>

#include "pagedllm_mpi.h"

int main(int argc, char **argv) {
    int level;
    pllm_communicator c = {.struct_size = sizeof c};
    MPI_Init_thread(&argc, &argv, MPI_THREAD_SINGLE, &level);
    int result = pllm_mpi_communicator(MPI_COMM_SELF, &c);
    int expected = level < MPI_THREAD_SERIALIZED ? MPI_ERR_OTHER : MPI_SUCCESS;
    if (result != expected) fprintf(stderr, "level %d: result %d\n", level, result);
    if (result == MPI_SUCCESS) c.close(c.user_data);
    MPI_Finalize();
    return result != expected;
}
