package pagedllm

// #include "glue.h"
import "C"

import (
	"context"
	"errors"
	"os"
	"sync"
	"syscall"
	"time"
	"unsafe"
)

// mailbox waits for the outputs of a C queue on the network poller of the runtime. A goroutine that
// waits blocks no thread.
type mailbox struct {
	queue *shared[*C.pllm_queue]
	// readable is a duplicate of the queue's eventfd: it is readable while the queue is not empty.
	readable *os.File
	event    syscall.RawConn
	// turn is held by the goroutine that waits, because the descriptor has only one deadline.
	turn chan struct{}
}

// newMailbox takes ownership of the queue. It is closed with the mailbox, or on an error.
func newMailbox(queue *shared[*C.pllm_queue]) (*mailbox, error) {
	m := &mailbox{queue: queue, turn: make(chan struct{}, 1)}
	if err := queue.use(m.listen); err != nil {
		m.close()
		return nil, err
	}
	return m, nil
}

// opening is held by the goroutine that opens descriptors. While the kernel grows the descriptor
// table, every thread that opens a descriptor blocks. The lock keeps the number of these threads at
// one.
var opening sync.Mutex

func (m *mailbox) listen(queue *C.pllm_queue) error {
	opening.Lock()
	defer opening.Unlock()
	var fd C.int32_t
	if err := check(C.pllm_queue_get_event_fd(queue, &fd)); err != nil {
		return err
	}
	// The library closes its descriptor with the queue. The Go poller needs one that it closes
	// itself.
	own, _, errno := syscall.Syscall(syscall.SYS_FCNTL, uintptr(fd), syscall.F_DUPFD_CLOEXEC, 0)
	if errno != 0 {
		return &Error{Code: ErrCapacity, Message: "no file descriptor for the queue (" + errno.Error() + "); raise the limit (ulimit -n)"}
	}
	m.readable = os.NewFile(own, "pagedllm queue")
	// NewFile does not report that the poller cannot watch the descriptor; SetReadDeadline does.
	if err := m.readable.SetReadDeadline(time.Time{}); err != nil {
		return &Error{Code: ErrCapacity, Message: "the network poller cannot watch the queue's descriptor (" + err.Error() + ")"}
	}
	var err error
	m.event, err = m.readable.SyscallConn()
	return err
}

// close wakes the waiting goroutines, then frees the queue.
func (m *mailbox) close() {
	m.readable.Close()
	m.queue.close()
}

// take returns all outputs of the queue without waiting.
func (m *mailbox) take() (outputs []Output, err error) {
	err = m.queue.use(func(queue *C.pllm_queue) error {
		outputs, err = takeOutputs(queue)
		return err
	})
	return outputs, err
}

// wait waits for the first output and returns all outputs of the queue.
func (m *mailbox) wait(ctx context.Context) (outputs []Output, err error) {
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	select {
	case m.turn <- struct{}{}:
		defer func() { <-m.turn }()
	case <-ctx.Done():
		return nil, ctx.Err()
	}
	defer m.interruptWhenDone(ctx)()
	// The poller reports an event once. No event is lost: Read arms the poller before it calls the
	// function, and taking the outputs resets the event.
	interrupted := m.event.Read(func(uintptr) bool {
		outputs, err = m.take()
		return len(outputs) > 0 || err != nil
	})
	switch {
	case len(outputs) > 0 || err != nil || interrupted == nil:
		return outputs, err
	case errors.Is(interrupted, os.ErrDeadlineExceeded):
		return nil, ctx.Err()
	default: // close has closed the descriptor, and is about to free the queue
		return nil, m.queue.closed()
	}
}

// interruptWhenDone interrupts the wait when ctx is done, until the returned function is called.
func (m *mailbox) interruptWhenDone(ctx context.Context) (stop func()) {
	interrupted := make(chan struct{})
	unregister := context.AfterFunc(ctx, func() {
		m.readable.SetReadDeadline(time.Unix(1, 0))
		close(interrupted)
	})
	return func() {
		if !unregister() {
			<-interrupted
			m.readable.SetReadDeadline(time.Time{})
		}
	}
}

func takeOutputs(queue *C.pllm_queue) ([]Output, error) {
	var batch C.output_batch
	if err := check(C.take_outputs(queue, &batch)); err != nil {
		return nil, err
	}
	if batch.outputs == nil {
		return nil, nil
	}
	defer C.pllm_outputs_free(batch.outputs)
	return copyOutputs(batch), nil
}

func copyOutputs(batch C.output_batch) []Output {
	outputs := make([]Output, batch.len)
	record := unsafe.Pointer(batch.first)
	stride := uintptr(batch.first.struct_size)
	for i := range outputs {
		outputs[i] = goOutput(unsafe.Add(record, uintptr(i)*stride), stride)
	}
	return outputs
}

// goOutput copies an output of size bytes. An older library has fewer fields; the others are zero.
func goOutput(record unsafe.Pointer, size uintptr) (output Output) {
	var c C.pllm_output
	copy(unsafe.Slice((*byte)(unsafe.Pointer(&c)), unsafe.Sizeof(c)), unsafe.Slice((*byte)(record), size))
	output.fromC(&c)
	return output
}
