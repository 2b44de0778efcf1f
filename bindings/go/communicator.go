package pagedllm

// #include "glue.h"
import "C"

import (
	"context"
	"runtime"
	"strings"
	"sync"
	"time"
	"unsafe"
)

// A Communicator is a rank of a group of processes that compute one model. Rank 0 opens an engine,
// and each other rank calls RunWorker, both with Options.Communicator. If the call succeeds, the
// engine or the worker has the communicator and closes it at its end. If it fails, close the
// communicator: the other ranks wait for that.
//
// Communicators with functions of the host's own, such as those of bindings/mpi, are for programs
// in C and C++.
type Communicator struct{ rank *groupRank }

// groupRank is a pllm_communicator of the library. Its words have no pointer type, because the user
// data is a number, which the garbage collector must not take for an address.
type groupRank struct {
	words [C.sizeof_pllm_communicator / 8]uint64

	mu       sync.Mutex
	isTaken  bool // by an engine or a worker
	isClosed bool
}

func (r *groupRank) c() *C.pllm_communicator { return (*C.pllm_communicator)(unsafe.Pointer(&r.words)) }

// SharedMemoryCommunicator joins a group of processes, or goroutines, of this host, which
// communicate through shared memory. Rank 0 creates the file at the path, usually below /dev/shm,
// where a file system in memory is. It removes the file when its communicator is closed. size is
// the number of ranks. The function blocks its thread until all ranks have joined, at most for the
// timeout; 0 is no limit. If a rank does not join in time, it returns ErrIO.
func SharedMemoryCommunicator(path string, rank, size int, timeout time.Duration) (*Communicator, error) {
	var args arguments
	defer args.Unpin()
	var cRank, cSize C.uint32_t
	var cTimeout C.uint64_t
	args.setUint32(&cRank, "rank", rank)
	args.setUint32(&cSize, "size", size)
	args.setMilliseconds64(&cTimeout, "timeout", timeout)
	if strings.ContainsRune(path, 0) {
		args.refuse("path has a NUL byte; pass a path of a file")
	}
	if args.err != nil {
		return nil, args.err
	}
	cPath, _ := args.text(path + "\x00")
	r := &groupRank{words: [len(groupRank{}.words)]uint64{C.sizeof_pllm_communicator}} // struct_size is first
	args.Pin(r)
	if err := check(C.pllm_communicator_shared_memory(cPath, cRank, cSize, cTimeout, r.c())); err != nil {
		return nil, err
	}
	c := &Communicator{r}
	whenUnreachable(c, r.close)
	return c, nil
}

// Rank returns the number of this rank, below Size.
func (c *Communicator) Rank() int { return int(c.rank.c().rank) }

// Size returns the number of ranks.
func (c *Communicator) Size() int { return int(c.rank.c().size) }

// Close leaves the group. It has no effect on an engine or a worker that has the communicator, and
// waits for nothing. It may be called at any time, from any goroutine, more than once. It returns
// nil.
func (c *Communicator) Close() error {
	c.rank.close()
	return nil
}

// use makes a call with the communicator, which belongs to the library if the call succeeds. The
// library refuses a communicator that another call has taken.
func (c *Communicator) use(call func(*groupRank) error) error {
	// The cleanup of an unreachable communicator must not close it during the call.
	defer runtime.KeepAlive(c)
	if c.rank.hasClosed() {
		return &Error{Code: ErrClosed, Message: "the communicator is closed"}
	}
	err := call(c.rank)
	if err == nil {
		c.rank.take()
	}
	return err
}

func (r *groupRank) hasClosed() bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.isClosed
}

func (r *groupRank) take() {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.isTaken = true
}

func (r *groupRank) close() {
	r.mu.Lock()
	defer r.mu.Unlock()
	if !r.isTaken && !r.isClosed {
		C.close_communicator(r.c())
	}
	r.isClosed = true
}

// RunWorker runs one of several workers that compute a model with the engine of rank 0, which is in
// another process or goroutine. The options are those of the engine: the same model and formats,
// and a communicator with another rank. RunWorker loads this worker's part of the model, and
// returns nil when the engine is closed. An error ends the engine, too: its calls return
// ErrInternal.
//
// The worker has a thread of its own. If the context is done, RunWorker returns its error, and the
// loading stops. A worker that has loaded its part continues until the engine is closed or this
// process ends.
func RunWorker(ctx context.Context, options Options) error {
	_, err := load(ctx, &options, ctx.Done(), func(state *loading) (struct{}, error) {
		return struct{}{}, options.take(func(c *C.pllm_engine_options) error {
			return check(C.run_worker(c, (*C.load_state)(state)))
		})
	})
	return err
}
