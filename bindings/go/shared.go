package pagedllm

import "sync"

// shared is a C object for concurrent calls. close waits for the calls in progress and frees it
// once.
type shared[P comparable] struct {
	name string
	free func(P)

	mu     sync.RWMutex
	object P // zero after it has been freed
}

// use makes a call on the object, which is not freed during the call. It is not reentrant.
func (s *shared[P]) use(call func(P) error) error {
	s.mu.RLock()
	defer s.mu.RUnlock()
	var freed P
	if s.object == freed {
		return s.closed()
	}
	return call(s.object)
}

func (s *shared[P]) close() {
	s.mu.Lock()
	defer s.mu.Unlock()
	var freed P
	if s.object != freed {
		s.free(s.object)
		s.object = freed
	}
}

func (s *shared[P]) closed() error {
	return &Error{Code: ErrClosed, Message: "the " + s.name + " is closed"}
}
