/* A communicator of libpagedllm that uses MPI. Compile pagedllm_mpi.c with the mpicc of the MPI that the
 * program uses: the implementations have different binary interfaces. It calls no function of
 * libpagedllm. README.md describes the limits. */
#ifndef PAGEDLLM_MPI_H
#define PAGEDLLM_MPI_H

#include <mpi.h>

#include "pagedllm.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Creates a communicator of the ranks of comm, which all of them call. comm is duplicated, so that its
 * messages and those of the program stay apart. Set struct_size of out_communicator before the call.
 *
 * Returns MPI_SUCCESS, or an error class of MPI: MPI_ERR_ARG if out_communicator is NULL or its
 * struct_size is too small, MPI_ERR_NO_MEM, and MPI_ERR_OTHER if MPI is not initialized or offers less
 * than MPI_THREAD_SERIALIZED (see MPI_Init_thread). Errors of MPI itself are those of comm.
 *
 * The functions of the communicator return error classes of MPI, too. They ignore timeout_ms, since MPI
 * cannot take a buffer back from an operation that has not ended.
 *
 * Threads: those of pllm_communicator. If the program calls MPI from other threads at the same time, it
 * needs MPI_THREAD_MULTIPLE.
 *
 * Ownership: as for pllm_communicator_shared_memory. Close the communicator before MPI_Finalize: free the
 * engine first. */
int pllm_mpi_communicator(MPI_Comm comm, pllm_communicator *out_communicator);

#ifdef __cplusplus
}
#endif

#endif
